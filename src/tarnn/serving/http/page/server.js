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

// Ask for an answer behind earlier turns, and call onText with its pieces. Returns {id, usage, cut}; cut: at the limit.
// An earlier turn with an id is a state that the server holds: what stands before is not sent again.
export async function answer(model, turns, asked, settings, key, onText, signal) {
  const last = turns.findLastIndex(turn => turn.id);
  try {
    return await answerFrom(model, turns, last, asked, settings, key, onText, signal);
  } catch (error) {
    if (last < 0 || error.param !== "previous_response_id" || turns.some(turn => turn.asked === null)) throw error;
    return answerFrom(model, turns, -1, asked, settings, key, onText, signal);  // no longer held: all is read again
  }
}

async function answerFrom(model, turns, last, asked, settings, key, onText, signal) {
  const since = turns.slice(last + 1);
  const input = model.chat
    ? [...since.flatMap(turn => [said("user", turn.asked), said("assistant", turn.answer)]), said("user", asked)]
    : since.map(turn => turn.asked + turn.answer).join("") + asked;
  const body = {model: model.id, stream: true, ...settings, metadata: toMetadata([...since, {asked}])};
  if (input.length) body.input = input;
  if (last >= 0) body.previous_response_id = turns[last].id;
  const options = {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal};
  for await (const event of events(await ask("v1/responses", key, options))) {
    if (event.type === "response.output_text.delta") onText(event.delta);
    if (event.type === "error" || event.error) throw new Refused(200, (event.error || event).message);
    const response = event.response || {};
    if (response.status === "failed") throw new Refused(200, response.error.message);
    if (response.status === "completed" || response.status === "incomplete")
      return {id: response.store ? response.id : null, usage: response.usage, cut: response.status === "incomplete"};
  }
  throw new Refused(0, "The connection broke before the answer's end.");
}

const said = (role, content) => ({role, content});

// ---- a conversation that is opened again ----

// The server returns what a response wrote, not what it read: so the page's part is sent as metadata of the response, in
// pieces of the length that the API takes. What is longer than all of them is not sent.
const PIECE = 512, PIECES = 16;
function toMetadata(turns) {
  const letters = Array.from(JSON.stringify(turns.map(({asked, answer}) => ({asked, answer}))));
  if (letters.length > PIECE * PIECES) return {};
  const starts = Array.from({length: Math.ceil(letters.length / PIECE)}, (_, i) => i * PIECE);
  return Object.fromEntries(starts.map((at, i) => [`page${i}`, letters.slice(at, at + PIECE).join("")]));
}

function fromMetadata(metadata) {
  try {
    return JSON.parse(Array.from({length: PIECES}, (_, i) => metadata[`page${i}`] || "").join(""));
  } catch {
    return [{asked: null}];  // not of this page, or too long
  }
}

// The turns up to a response that the server holds, and the model. `asked` is null where the server does not know it.
export async function conversation(id, key) {
  let turns = [], model = null;
  for (let at = id; at;) {
    let response;
    try {
      response = await (await ask(`v1/responses/${encodeURIComponent(at)}`, key)).json();
    } catch (error) {
      if (error.status !== 404 || !turns.length) throw error;
      turns = [{asked: null, answer: "", id: null, tokens: 0, facts: ""}, ...turns];  // what was before is gone
      break;
    }
    model ??= response.model;
    const said = fromMetadata(response.metadata).map(x => ({answer: "", id: null, tokens: 0, facts: "Stopped.", ...x}));
    const written = response.output.flatMap(x => x.content).map(x => x.text).join("");
    const {id, usage} = response, facts = `${usage.output_tokens.toLocaleString("en")} tokens.`;
    said.push({...said.pop(), answer: written, id, tokens: usage.total_tokens, facts});
    turns = [...said, ...turns];
    at = response.previous_response_id;
  }
  return {turns, model};
}
