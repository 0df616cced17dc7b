// What the page asks of the server. Addresses are relative, so that the page works behind a proxy with a path of its own.

// An answer that is an error: `message` is the server's own sentence.
export class Refused extends Error {
  constructor(status, message, param) {
    super(message);
    Object.assign(this, {status, param});
  }
}

async function ask(path, key, options = {}) {
  const headers = {...options.headers, ...(key ? {Authorization: `Bearer ${key}`} : {})};
  let answer;
  try {
    answer = await fetch(path, {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server can't be reached. Is it running?");
  }
  if (!answer.ok) {
    const {error = {}} = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, error.message || `The server answered with status ${answer.status}.`, error.param);
  }
  return answer;
}

export async function models(key) {
  return (await (await ask("v1/models", key)).json()).data;
}

// The objects of a stream of server-sent events, up to its end.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trim()).join("\n");
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The connection broke before the answer's end.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Ask for an answer behind earlier turns, and call onText with its pieces: {id, usage, ended}, where `ended` says how.
// An earlier turn with an id is a state that the server holds: what stands before is not sent again.
export async function answer(model, turns, asked, settings, key, onText, signal) {
  const last = turns.findLastIndex(turn => turn.id);
  try {
    return await answerFrom(model, turns, last, asked, settings, key, onText, signal);
  } catch (error) {
    if (last < 0 || error.param !== "previous_response_id") throw error;
    return answerFrom(model, turns, -1, asked, settings, key, onText, signal);  // no longer held: all is read again
  }
}

async function answerFrom(model, turns, last, asked, settings, key, onText, signal) {
  const since = turns.slice(last + 1);
  const input = model.chat
    ? [...since.flatMap(turn => [said("user", turn.asked), said("assistant", turn.answer)]), said("user", asked)]
    : since.map(turn => turn.asked + turn.answer).join("") + asked;
  const body = {model: model.id, stream: true, ...settings};
  if (input.length) body.input = input;
  if (last >= 0) body.previous_response_id = turns[last].id;
  const options = {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal};
  for await (const event of events(await ask("v1/responses", key, options))) {
    if (event.type === "response.output_text.delta") onText(event.delta);
    if (event.type === "error" || event.error) throw new Refused(200, (event.error || event).message);
    const response = event.response || {};
    if (response.status === "failed") throw new Refused(200, response.error.message);
    if (response.status === "completed" || response.status === "incomplete")
      return {id: response.store ? response.id : null, usage: response.usage, ended: response.status === "completed" ? "" : "cut at the limit"};
  }
  throw new Refused(0, "The connection broke before the answer's end.");
}

const said = (role, content) => ({role, content});
