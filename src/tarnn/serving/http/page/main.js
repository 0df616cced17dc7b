// The page: a conversation or a text that goes on, its forks, and what its state takes.

import {answer, models, Refused} from "./server.js";

const $ = id => document.getElementById(id);
const SETTINGS = {temperature: "temperature", top_p: "top_p", seed: "seed", max_tokens: "max_output_tokens"};

// A turn: {asked, answer, id, tokens, facts}. id: of the state that the server holds behind it; none where it was stopped.
// A fork is a list of turns and what stands in the box for text; turns are never changed once they have ended.
let forks = [{name: "1", turns: [], text: ""}];
let here = forks[0];
let known = [];  // the models
let running = null;  // while an answer comes: {stop, turn}

const model = () => known.find(x => x.id === $("model").value);
const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
function bytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]])
    if (n >= size) return `${(n / size).toPrecision(3).replace(/\.0+$/, "")} ${unit}`;
  return `${n} bytes`;
}

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

function piece(title, text, kind, ...controls) {
  const body = element("div", {class: "text"}, text);
  const box = element("article", {class: kind, "aria-label": title}, element("h3", {}, title), body);
  box.append(element("footer", {}, ...controls));
  return box;
}

function shown(turn, i) {
  const boxes = [], chat = model().chat, n = i + 1;
  if (turn.asked) boxes.push(piece(chat ? "You" : "You wrote", turn.asked, "mine",
    button("Fork before", `Fork before message ${n} of yours`, () => fork(i, turn.asked)),
    button("Undo", `Undo from message ${n} of yours on`, () => undo(i))));
  boxes.push(piece(chat ? "Model" : "The model wrote", turn.answer, "theirs",
    button("Fork", `Fork behind answer ${n}`, () => fork(n, "")),
    button("Undo", `Undo from answer ${n} on`, () => undo(i)),
    element("span", {class: "facts"}, turn.facts)));
  return boxes;
}

const atEnd = () => document.documentElement.scrollHeight - innerHeight - scrollY < 80;
const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);

// follow: show the end, which a reader who looks at something else is spared.
function draw(follow = true) {
  $("messages").replaceChildren(...here.turns.flatMap(shown));
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
  measure(here.turns.at(-1)?.tokens || 0);
  if (follow) toEnd();
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

// ---- forks and undo ----

function go(fork) {
  if (running) return;
  here.text = $("text").value;
  here = fork;
  $("text").value = here.text;
  complain("");
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

// Back to the state before turn i; what was asked there may be changed and sent again.
function undo(i) {
  if (running) return;
  $("text").value = here.turns[i].asked;
  here.turns = here.turns.slice(0, i);
  complain("");
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
  $("stop").disabled = !on;
  $("messages").setAttribute("aria-busy", String(on));
  for (const x of document.querySelectorAll("#messages button, #branches button")) x.disabled = on;
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
  const stopper = new AbortController();
  running = {stop: () => stopper.abort()};
  $("text").value = "";
  const boxes = shown(turn, here.turns.length);
  $("messages").append(...boxes);
  busy(true);
  tell("The model writes.");
  const target = boxes.at(-1).querySelector(".text"), text = document.createTextNode("");
  target.append(text);
  toEnd();

  // pieces come more often than a screen is drawn
  let pieces = 0, first = 0, last = 0, pending = "", frame = 0;
  const asks = performance.now();
  const paint = () => {
    frame = 0;
    const follow = atEnd();
    text.appendData(pending);
    pending = "";
    measure(before + pieces, `about ${rate(pieces, asks, first, last)}`);
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
    const {id, usage, ended} = await answer(model(), here.turns, asked, settings(), $("key").value, onText, stopper.signal);
    Object.assign(turn, {id, tokens: usage.total_tokens, facts: factsOf(usage, ended, asks, first, last)});
    if (first) $("speed").textContent = rate(usage.output_tokens, asks, first, last);
    tell(`The answer has ended: ${counted(usage.output_tokens, "token")}.`);
  } catch (error) {
    turn.tokens = before + pieces;
    turn.facts = "stopped";
    if (error.name === "AbortError") tell("Stopped.");
    else wrong(error);
  }
  cancelAnimationFrame(frame);
  running = null;
  if (turn.id || turn.answer) here.turns = [...here.turns, turn];
  else $("text").value = asked;  // nothing came: it may be sent again
  draw(atEnd());
  busy(false);
  if (document.activeElement === document.body || document.activeElement === $("stop")) $("text").focus();
}

// What stands below an answer.
function factsOf(usage, ended, asks, first, last) {
  const kept = usage.input_tokens_details.cached_tokens, written = usage.output_tokens;
  const facts = [counted(written, "token")];
  if (first) facts.push(`${rate(written, asks, first, last)} a second`, `first after ${Math.round(first - asks)} ms`);
  facts.push(`${counted(usage.input_tokens - kept, "token")} read` + (kept ? `, ${kept.toLocaleString("en")} already in the state` : ""));
  return [...facts, ...(ended ? [ended] : [])].join(" · ");
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
  busy(false);
  draw();
  $("text").focus();
}

$("ask").onsubmit = event => { event.preventDefault(); send(); };
$("stop").onclick = () => running?.stop();
$("text").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
document.onkeydown = event => { if (event.key === "Escape") running?.stop(); };
$("settings").onsubmit = event => event.preventDefault();
$("key-form").onsubmit = event => { event.preventDefault(); begin(); };
$("model").onchange = () => {  // a state belongs to its model
  forks = [{name: "1", turns: [], text: ""}];
  here = forks[0];
  draw();
};
$("more").open = matchMedia("(min-width: 60rem)").matches;
$("key").value = sessionStorage.getItem("key") || "";
$("key-form").hidden = !$("key").value;
$("send").disabled = true;
begin();
