// The page: a conversation or a text that goes on, its forks, and what its state takes.

import {answer, conversation, models, Refused} from "./server.js";

const $ = id => document.getElementById(id);
const SETTINGS = {temperature: "temperature", top_p: "top_p", seed: "seed", max_tokens: "max_output_tokens"};

// A turn: {asked, answer, id, tokens, facts}. id: of the state that the server holds behind it; none where it was stopped.
// A fork is a list of turns and what stands in the box for text; turns are never changed once they have ended. asked: null if
// the page does not know it.
let forks, here;
let known = [];  // the models
let running = null;  // while an answer comes: {stop}
const EXAMPLES = ["Once upon a time", "The sea was calm, and", "In the morning they"];
const QUESTIONS = ["What can you do?", "Tell me a short story.", "Explain what a river is."];

const model = () => known.find(x => x.id === $("model").value);
const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
function bytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]])
    if (n >= size) return `${(n / size).toPrecision(3).replace(/\.0+$/, "")} ${unit}`;
  return `${n} bytes`;
}
const short = n => n >= 1e9 ? `${(n / 1e9).toPrecision(2)} billion` : n >= 1e6 ? `${(n / 1e6).toPrecision(2)} million` : n.toLocaleString("en");

// Bytes that are no characters, and characters that no font draws, would be shown as boxes.
const BOXES = /\uFFFD|[^\P{C}\t\n\p{Cf}]/gu;
const readable = text => text.replace(BOXES, "");

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function button(text, label, action) {
  const made = element("button", {type: "button", "aria-label": label}, text);
  made.onclick = action;
  return made;
}

// What went wrong, as the server said it; "" takes it away.
function complain(text) { $("alert").textContent = text; }
function tell(text) { $("status").textContent = text; }

// ---- what is shown ----

// A part of the text with the menu of what can be done with it: pairs of a word and an action.
function piece(title, text, kind, name, actions) {
  const close = action => () => { menu.open = false; action(); };
  const buttons = actions.map(([word, action]) => button(word, `${word}: ${name}`, close(action)));
  const menu = element("details", {class: "menu", name: "menu"},
    element("summary", {"aria-label": `Actions for ${name}`, title: "Fork, undo, copy"}, "…"), element("div", {}, ...buttons));
  return element("article", {class: kind, "aria-label": title},
    element("header", {}, element("h3", {}, title), menu), element("div", {class: "text"}, text));
}

const UNKNOWN = "This part was not sent from this page, or is too long to be kept: the model has read it, but it can't be shown.";

function shown(turn, i) {
  const boxes = [], chat = model().chat, n = i + 1;
  if (turn.asked !== "") boxes.push(piece(chat ? "You" : "You wrote", turn.asked ?? UNKNOWN, "mine", `message ${n} of yours`, [
    ["Fork before this", () => fork(i, turn.asked ?? "")],
    ["Undo from here", () => undo(i)],
    ["Copy", () => copy(turn.asked ?? "")]]));
  if (turn.answer || turn === running?.turn) {
    const box = piece(chat ? "Model" : "The model wrote", readable(turn.answer), "theirs", `answer ${n}`, [
      ["Fork after this", () => fork(n, "")],
      ["Undo from here", () => undo(i)],
      ["Copy", () => copy(readable(turn.answer))]]);
    const hidden = turn.answer.match(BOXES)?.length;
    const left = hidden ? `${counted(hidden, "character")} that can't be shown ${hidden === 1 ? "is" : "are"} left out.` : "";
    box.append(element("p", {class: "facts"}, [turn.facts, left].filter(x => x).join(" ")));
    boxes.push(box);
  }
  return boxes;
}

// What stands where no text is yet: what this model is, and beginnings to try.
function welcome() {
  const {id, chat, parameters, weights, state_bytes: state, state_bytes_per_token: growing, cache_bytes_per_token: each} = model();
  const examples = (chat ? QUESTIONS : EXAMPLES).map(x => button(x, `Try: ${x}`, () => { $("text").value = x; send(); }));
  const paragraph = (...parts) => element("p", {}, ...parts);
  return element("div", {class: "welcome"},
    element("h3", {}, id),
    paragraph(`A model of ${short(parameters)} parameters, with ${weights} weights. ` +
      (chat ? "It answers your messages." : "It goes on with a text that you begin.")),
    paragraph(`All that it remembers of a text is its state: ${bytes(state)}` + (growing
      ? `, and ${bytes(growing)} for each token in its softmax layers.`
      : `, however long the text is. With softmax attention it would keep ${bytes(each)} for each token.`)),
    paragraph("The server holds the state after each answer. So in the menu “…” of an answer you can undo it, or fork the text there: both forks go on, and nothing is read again."),
    paragraph(chat ? "Ask something, or try:" : "Write a beginning, or try:"),
    element("div", {class: "row"}, ...examples));
}

const atEnd = () => document.documentElement.scrollHeight - innerHeight - scrollY < 80;
const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);

// follow: show the end, which a reader who looks at something else is spared.
function draw(follow = true) {
  $("messages").replaceChildren(...(here.turns.length ? here.turns.flatMap(shown) : [welcome()]));
  $("messages").classList.toggle("one-text", !model().chat);
  $("branches").hidden = forks.length === 1;
  $("branches").replaceChildren(...forks.map(x => {
    const made = button(`Fork ${x.name}`, `Fork ${x.name}, ${counted(x.turns.length, "answer")}`, () => go(x));
    if (x === here) made.setAttribute("aria-current", "true");
    return made;
  }));
  const chat = model().chat;
  $("text-label").textContent = chat ? "Message" : "Text to go on from";
  $("send").textContent = chat ? "Send" : "Go on";
  $("curl").textContent = request();
  $("new").disabled = $("copy").disabled = !!running || !here.turns.length;
  measure(here.turns.at(-1)?.tokens || 0, "–");
  if (follow && here.turns.length) toEnd();
}

// The same request from a program.
function request() {
  const {id, chat} = model(), key = $("key").value ? ' -H "Authorization: Bearer KEY"' : "";
  const body = chat ? {model: id, messages: [{role: "user", content: QUESTIONS[0]}]} : {model: id, prompt: EXAMPLES[0], max_tokens: 20};
  const address = new URL(chat ? "v1/chat/completions" : "v1/completions", document.baseURI);
  return `curl ${address} -H "Content-Type: application/json"${key} -d '${JSON.stringify(body).replaceAll("'", "\\u0027")}'`;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page that did not come by HTTPS may only copy what is selected
    const area = element("textarea", {class: "unseen"}, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  tell("Copied.");
}

function whole() {
  const {chat} = model();
  return here.turns.flatMap(({asked, answer}) => chat
    ? [`You: ${asked ?? ""}`, `Model: ${readable(answer)}`] : [asked ?? "", readable(answer)]).join(chat ? "\n\n" : "");
}

// The state's bytes at this length, beside those of keys and values.
function measure(tokens, speed) {
  const {state_bytes: fixed, state_bytes_per_token: growing, cache_bytes_per_token: each} = model();
  const state = fixed + tokens * growing, cache = tokens * each, most = Math.max(state, cache);
  $("length").textContent = tokens.toLocaleString("en");
  if (speed !== undefined) $("speed").textContent = speed;
  $("state-bytes").textContent = bytes(state);
  $("cache-bytes").textContent = bytes(cache);
  $("state-bar").style.width = `${100 * state / most}%`;
  $("cache-bar").style.width = `${100 * cache / most}%`;
  const equal = Math.ceil(fixed / (each - growing));
  $("compared").textContent = growing >= each ? "" : tokens < equal
    ? `The cache is larger from ${counted(equal, "token")} on; the state stays as it is.`
    : `The cache is ${(cache / state).toPrecision(2).replace(/\.0$/, "")} times as large.`;
  if (growing) $("compared").textContent = `Softmax layers of this hybrid add ${bytes(growing)} per token.`;
}

// ---- what survives a reload ----

const empty = () => ({name: "1", turns: [], text: ""});

// The address names the state that the conversation has come to. The tab keeps forks and texts beside it; in another tab the
// server's responses tell the conversation.
function remember(change = "replaceState") {
  const id = here.turns.findLast(turn => turn.id)?.id, address = id ? `#${id}` : location.pathname + location.search;
  const kept = {model: $("model").value, forks, at: forks.indexOf(here)};
  try {
    history[change](kept, "", address);
  } catch {  // larger than this browser keeps
    history[change](null, "", address);
  }
}

async function restore() {
  const kept = history.state, id = decodeURIComponent(location.hash.slice(1));
  forks = [here = empty()];
  try {
    if (kept && known.some(x => x.id === kept.model)) {
      $("model").value = kept.model;
      forks = kept.forks;
      here = forks[kept.at];
    } else if (id) {
      const {turns, model} = await conversation(id, $("key").value);
      $("model").value = model;
      here.turns = turns;
    }
  } catch (error) {
    wrong(error);
  }
  $("text").value = here.text;
  draw();
}

// ---- forks and undo ----

function go(fork) {
  if (running) return;
  here.text = $("text").value;
  here = fork;
  $("text").value = here.text;
  complain("");
  remember();
  draw();
  $("text").focus();
  tell(`Fork ${here.name}: ${counted(here.turns.length, "answer")}.`);
}

// Another conversation that shares the first turns: the server holds the state behind each of them.
function fork(turns, text) {
  if (running) return;
  const made = {name: String(Math.max(...forks.map(x => +x.name)) + 1), turns: here.turns.slice(0, turns), text};
  forks.push(made);
  go(made);
}

// An empty text. The browser's way back leads to the one before.
function anew() {
  if (running) return;
  here.text = $("text").value;
  remember();
  forks = [here = empty()];
  $("text").value = "";
  complain("");
  remember("pushState");
  draw();
  $("text").focus();
  tell("A new text.");
}

// Back to the state before turn i; what was asked there may be changed and sent again.
function undo(i) {
  if (running) return;
  $("text").value = here.turns[i].asked ?? "";
  here.turns = here.turns.slice(0, i);
  complain("");
  remember();
  draw();
  $("text").focus();
  tell(`Undone: ${counted(here.turns.length, "answer")} left.`);
}

// ---- an answer ----

function settings() {
  const given = {};
  for (const [id, name] of Object.entries(SETTINGS)) if ($(id).value !== "") given[name] = Number($(id).value);
  return given;
}

function busy(on) {
  $("send").disabled = $("model").disabled = on;
  $("new").disabled = $("copy").disabled = on || !here.turns.length;
  $("stop").disabled = !on;
  $("messages").setAttribute("aria-busy", String(on));
  for (const x of document.querySelectorAll("#messages .menu button, #branches button")) x.disabled = on;
}

async function send() {
  if (running || !known.length) return;
  const asked = $("text").value, chat = model().chat;
  if ((chat && !asked.trim()) || (!chat && !asked && !here.turns.length)) return $("text").focus();
  if (!$("settings").checkValidity()) {
    $("more").open = true;
    return $("settings").reportValidity();
  }
  complain("");
  const turn = {asked, answer: "", id: null, tokens: 0, facts: ""}, before = here.turns.at(-1)?.tokens || 0;
  const stopper = new AbortController(), fork = here;
  running = {stop: () => stopper.abort(), turn};
  $("text").value = "";
  if (!here.turns.length) $("messages").replaceChildren();
  const boxes = shown(turn, here.turns.length);
  $("messages").append(...boxes);
  busy(true);
  tell("The model writes.");
  const target = boxes.at(-1).querySelector(".text"), text = document.createTextNode("");
  target.append(text);
  toEnd();

  // pieces come more often than a screen is drawn
  let speed = "–", pieces = 0, first = 0, last = 0, pending = "", frame = 0;
  const asks = performance.now();
  const paint = () => {
    frame = 0;
    const follow = atEnd();
    text.appendData(readable(pending));
    pending = "";
    measure(before + pieces, rate(pieces, asks, first, last));
    if (follow) toEnd();
  };
  const onText = piece => {
    turn.answer += piece;
    pending += piece;
    pieces += 1;
    last = performance.now();
    first ||= last;
    frame ||= requestAnimationFrame(paint);
  };

  try {
    const {id, usage, cut} = await answer(model(), fork.turns, asked, settings(), $("key").value, onText, stopper.signal);
    Object.assign(turn, {id, tokens: usage.total_tokens, facts: factsOf(usage, cut, asks, first, last)});
    speed = rate(usage.output_tokens, asks, first, last);
    tell(`The answer has ended: ${counted(usage.output_tokens, "token")}.`);
  } catch (error) {
    turn.tokens = before + pieces;
    turn.facts = "Stopped.";
    if (error.name === "AbortError") tell("Stopped.");
    else wrong(error);
  }
  cancelAnimationFrame(frame);
  running = null;
  if (turn.id || turn.answer) fork.turns = [...fork.turns, turn];
  else if (fork === here) $("text").value = asked;  // nothing came: it may be sent again
  busy(false);
  if (fork !== here) return;  // the browser's way back was taken meanwhile
  remember();
  draw(atEnd());
  $("speed").textContent = speed;
  if (document.activeElement === document.body || document.activeElement === $("stop")) $("text").focus();
}

// What stands below an answer.
function factsOf(usage, cut, asks, first, last) {
  const kept = usage.input_tokens_details.cached_tokens, written = usage.output_tokens, read = usage.input_tokens - kept;
  const speed = first ? `, ${rate(written, asks, first, last)} per second, the first after ${Math.round(first - asks)} ms` : "";
  return [`${counted(written, "token")}${speed}.`,
    `It read ${counted(read, "token")}` + (kept ? `; ${kept.toLocaleString("en")} were already in the state.` : "."),
    ...(cut ? ["It stopped at the limit in Settings."] : [])].join(" ");
}

// Tokens a second from the first one on; of a few that came at once, since the request.
const rate = (tokens, asks, first, last) =>
  Math.round((last - first > 50 ? (tokens - 1) / (last - first) : tokens / (last - asks)) * 1e3).toLocaleString("en");

function wrong(error) {
  if (!(error instanceof Refused)) console.error(error);
  if (error.status !== 401 || $("key").value) complain(error.message);
  if (error.status === 401) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

// ---- the beginning ----

async function begin() {
  try {
    known = await models($("key").value);
  } catch (error) {
    return wrong(error);
  }
  complain("");
  sessionStorage.setItem("key", $("key").value);
  $("model").replaceChildren(...known.map(x => new Option(x.id, x.id)));
  $("which").hidden = known.length === 1;
  $("only-model").textContent = known.length === 1 ? known[0].id : "";
  $("api").hidden = !!$("key").value;  // a link sends no key
  await restore();
  busy(false);
  $("text").focus();
}

$("ask").onsubmit = event => { event.preventDefault(); send(); };
$("stop").onclick = () => running?.stop();
$("text").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
const opened = () => document.querySelector(".menu[open]");
document.onkeydown = event => {
  if (event.key !== "Escape") return;
  const menu = opened();
  if (!menu) return running?.stop();
  menu.open = false;
  menu.querySelector("summary").focus();
};
document.onclick = event => { if (!opened()?.contains(event.target)) opened()?.removeAttribute("open"); };
$("new").onclick = anew;
$("copy").onclick = () => copy(whole());
onpagehide = () => { if (here) { here.text = $("text").value; remember(); } };
onpopstate = () => { running?.stop(); if (known.length) restore(); };
$("settings").onsubmit = event => event.preventDefault();
$("key-form").onsubmit = event => { event.preventDefault(); begin(); };
$("model").onchange = () => {  // a state belongs to its model
  forks = [here = empty()];
  remember("pushState");
  draw();
};
$("more").open = matchMedia("(min-width: 60rem)").matches;
$("key").value = sessionStorage.getItem("key") || "";
$("key-form").hidden = !$("key").value;
$("send").disabled = true;
begin();
