/* Packed models in a browser, by tarnn.wasm: no server, and a state that does not grow with the text.
 *
 *     import { load } from "./tarnn.js";
 *     const model = await load("model.tarnn");
 *     for await (const piece of model.generate("Call me", { seed: 7 })) show(piece);
 *     const book = model.read("It was the best of times");  // a state: go on from it any number of times
 *     const blob = book.blob();                             // and keep it: model.open(await blob.arrayBuffer())
 *
 * Every failure is an Error with one sentence. States hold memory outside of JavaScript: free() gives it back at once, else the
 * collector of garbage does.
 */

const RUNTIME = new URL("tarnn.wasm", import.meta.url);
const PIECE = 1024; // tokens of a prompt that are read at once
const SLICE = 12; // milliseconds of work before the page may draw
// a function that returns a vector: where the browser has no SIMD, it is no WebAssembly
const OF_VECTORS = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11];

/** Open a packed file (`tarnn pack`, `tarnn export --format web`). source: its address, or its bytes. progress: called with (bytes, all
 * bytes) as it comes; all bytes are 0 where the server does not say. */
export async function load(source, { runtime = RUNTIME, progress = () => {} } = {}) {
  const [wasm, bytes] = await Promise.all([start(runtime), source instanceof Uint8Array ? source : fetched(source, progress)]);
  return new Model(wasm, bytes);
}

async function start(runtime) {
  if (typeof WebAssembly === "undefined") throw new Error("this browser has no WebAssembly; take a newer one.");
  if (!WebAssembly.validate(new Uint8Array(OF_VECTORS)))
    throw new Error("this browser's WebAssembly has no SIMD, which tarnn.wasm needs; take Chrome 95, Firefox 100, Safari 16.4 or newer.");
  const code = runtime instanceof Uint8Array ? runtime : await fetched(runtime, () => {});
  let exports;
  const numbers = () => new DataView(exports.memory.buffer);
  const system = {
    clock_time_get: () => 0,
    environ_get: () => 0,
    environ_sizes_get: (count, size) => (numbers().setUint32(count, 0, true), numbers().setUint32(size, 0, true), 0),
    proc_exit: () => { throw new Error("tarnn.wasm ended, which is an error in tarnn: please report it."); },
  };
  const none = 8; // what WASI answers where there is no such file
  const wasi = new Proxy(system, { get: (known, name) => known[name] ?? (() => none) });
  exports = (await WebAssembly.instantiate(code, { wasi_snapshot_preview1: wasi })).instance.exports;
  exports._initialize();
  return exports;
}

async function fetched(address, progress) {
  const response = await fetch(address).catch(() => null);
  if (!response?.ok) throw new Error(`${address} can't be fetched${response ? ` (${response.status})` : ""}. Serve the folder over HTTP; a page opened as a file can't fetch.`);
  const all = Number(response.headers.get("content-length") ?? 0), parts = [];
  let size = 0;
  for (const reader = response.body.getReader(); ; progress(size, all)) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value), (size += value.length);
  }
  const bytes = new Uint8Array(size);
  parts.reduce((at, part) => (bytes.set(part, at), at + part.length), 0);
  return bytes;
}

/** The calls of tarnn.h (csrc/runtime), whose failures are thrown. */
class Library {
  constructor(wasm) {
    this.wasm = wasm;
    this.cell = this.room(64); // for what calls give back
    this.scratch = 0;
    this.scratchSize = 0;
  }
  room(bytes, what = "this") {
    const whole = Math.max(64, Math.ceil(bytes / 64) * 64);
    const at = whole < 2 ** 32 ? this.wasm.aligned_alloc(64, whole) >>> 0 : 0;
    if (!at) throw new Error(`there is no memory for ${what} (${(bytes / 1e6).toFixed(1)} MB).`);
    return at;
  }
  /** Memory that the next call may write over. */
  borrowed(bytes) {
    if (bytes > this.scratchSize) {
      this.wasm.free(this.scratch), (this.scratchSize = 0);
      this.scratch = this.room(bytes), (this.scratchSize = bytes);
    }
    return this.scratch;
  }
  bytes(at, size) { return new Uint8Array(this.wasm.memory.buffer, at, size); }
  number() { return new DataView(this.wasm.memory.buffer).getUint32(this.cell, true); }
  call(name, ...given) {
    if (!this.wasm[`tarnn_${name}`](...given)) return;
    const at = this.wasm.tarnn_error() >>> 0, all = new Uint8Array(this.wasm.memory.buffer);
    throw new Error(new TextDecoder().decode(all.slice(at, all.indexOf(0, at))));
  }
  /** A call that puts a pointer or a size into its last argument. */
  made(name, ...given) { return this.call(name, ...given, this.cell), this.number(); }
  text(text) {
    const bytes = typeof text === "string" ? new TextEncoder().encode(text) : text;
    const at = this.borrowed(bytes.length);
    return this.bytes(at, bytes.length).set(bytes), [at, bytes.length];
  }
}

const forgotten = new FinalizationRegistry((free) => free());

export class Model {
  constructor(wasm, bytes) {
    this.library = new Library(wasm);
    const at = this.library.room(bytes.length, "this model");
    this.library.bytes(at, bytes.length).set(bytes);
    this.program = this.library.made("open_bytes", at, bytes.length);
    this.vocabSize = Number(wasm.tarnn_vocab_size(this.program));
    this.numPositions = Number(wasm.tarnn_num_positions(this.program));
    this.numOutputs = Number(wasm.tarnn_num_outputs(this.program));
    this.logitsAt = this.library.room(4 * this.numOutputs);
    this.optionsAt = this.library.room(64);
    this.tokenizer = 0;
    try {
      this.tokenizer = this.library.made("open_tokenizer", this.program);
    } catch (error) {
      this.whyNoText = error.message; // the model takes tokens
    }
  }

  /** The tokens of a text, an array of numbers. starts: the text follows nothing. */
  encode(text, { starts = true } = {}) {
    const { library, tokenizer } = this;
    if (!tokenizer) throw new Error(this.whyNoText);
    const given = [tokenizer, ...library.text(text), Number(starts)];
    const count = library.made("encode", ...given, 0, 0), tokens = library.room(8 * count);
    try {
      library.call("encode", ...given, tokens, count, library.cell);
      return Array.from(new BigInt64Array(library.wasm.memory.buffer, tokens, count), Number);
    } finally {
      library.wasm.free(tokens);
    }
  }

  /** The bytes of a token; a character may be spread over several. */
  bytesOf(token) {
    const at = this.library.wasm.tarnn_bytes_of(this.tokenizer, BigInt(token), this.library.cell) >>> 0;
    return this.library.bytes(at, this.library.number());
  }

  /** Whether a token ends a text. */
  isEnd(token) { return this.library.wasm.tarnn_is_end(this.program, BigInt(token)) !== 0; }

  /** The state before the first token. */
  state() { return new State(this, this.library.made("new", this.program, 1n), []); }

  /** The state after a text, or tokens, that follows those of `state`, which stays as it is. */
  read(text, state) {
    const tokens = typeof text === "string" ? this.encode(text, { starts: !state }) : text;
    const after = state ? state.fork() : this.state();
    try {
      after.add(tokens), after.readAllButOne();
    } catch (error) {
      after.free();
      throw error;
    }
    return after;
  }

  /** A state that was kept as bytes (an ArrayBuffer): `state.blob().arrayBuffer()`, or a file of `tarnn-run --state-out`. */
  open(kept) {
    const bytes = new Uint8Array(kept), size = bytes.length - 8;
    if (size < 0) throw new Error("these bytes are no saved state.");
    const last = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigInt64(size, true));
    return new State(this, this.library.made("load", this.program, ...this.library.text(bytes.subarray(0, size))), [last]);
  }

  /** Continue a prompt (text or tokens), after `state` where there is one: see Writing. */
  generate(prompt, { state, ...options } = {}) { return new Writing(this, this.read(prompt, state), options); }
}

/** Where a text stands: a value of constant size, but for layers of softmax. The last token is yet to be read; so no logits are kept. */
export class State {
  constructor(model, pointer, unread) {
    this.model = model;
    this.unread = unread;
    this.free = once(() => model.library.wasm.tarnn_free(pointer));
    this.pointer = pointer;
    forgotten.register(this, this.free);
  }

  get position() { return Number(this.model.library.wasm.tarnn_position(this.pointer, 0n)) + this.unread.length; }

  /** How many bytes it has when it is kept. */
  get size() { return this.model.library.made("save", this.pointer, 0, 0) + 8; }

  fork() { return new State(this.model, this.model.library.made("fork", this.pointer, 0, 0n), [...this.unread]); }

  bytes() {
    const { library } = this.model, size = this.size - 8, at = library.borrowed(size);
    library.call("save", this.pointer, at, size, library.cell);
    const bytes = new Uint8Array(size + 8);
    bytes.set(library.bytes(at, size));
    new DataView(bytes.buffer).setBigInt64(size, BigInt(this.unread.at(-1) ?? 0), true);
    return bytes;
  }

  /** The state as a file: model.open reads it, and `tarnn-run --state-in`. */
  blob() { return new Blob([this.bytes()], { type: "application/octet-stream" }); }

  add(tokens) { this.unread.push(...tokens); }

  readAllButOne() { this.readSome(this.unread.length - 1); }

  /** Read what is unread; the logits of the next token, which the next call writes over. */
  logits() {
    if (!this.unread.length) throw new Error("nothing was read yet, so there is no next token; give a prompt.");
    this.readSome(this.unread.length);
    return new Float32Array(this.model.library.wasm.memory.buffer, this.model.logitsAt, this.model.numOutputs);
  }

  readSome(count) {
    const { library, logitsAt } = this.model;
    for (let n; count > 0; count -= n) {
      n = Math.min(count, PIECE);
      const at = library.borrowed(8 * (n + 1));
      const tokens = new BigInt64Array(library.wasm.memory.buffer, at, n + 1);
      for (let i = 0; i < n; ++i) tokens[i] = BigInt(this.unread[i]);
      tokens[n] = BigInt(n);
      library.call("read", this.pointer, at, at + 8 * n, 1, logitsAt);
      this.unread.splice(0, n);
    }
  }
}

function once(f) {
  return () => { f?.(), (f = null); };
}

/** A text as it is written: iterate over its pieces, or call `step` for a token. state: where it stands (fork it to keep it). */
export class Writing {
  constructor(model, state, { maxNewTokens = 256, temperature, topP, minP, topK, seed = Math.floor(Math.random() * 2 ** 32) } = {}) {
    Object.assign(this, { model, state, maxNewTokens, count: 0, over: "" });
    const { library, optionsAt, program } = model;
    library.wasm.tarnn_default_sampling(program, optionsAt);
    const usual = new DataView(library.wasm.memory.buffer, optionsAt, 40);
    const number = (place, given) => given ?? usual.getFloat64(place, true);
    this.numbers = [number(0, temperature), number(8, topP), number(16, minP)];
    this.whole = [topK === undefined ? usual.getBigInt64(24, true) : BigInt(topK), BigInt(seed)];
    this.decoder = new TextDecoder();
  }

  /** Write one token; { token, text }, or undefined where the text is over. */
  step() {
    if (!this.over && this.count >= this.maxNewTokens) this.over = "maxNewTokens reached";
    if (this.over) return undefined;
    const { model, state } = this, { library } = model;
    state.logits();
    const options = new DataView(library.wasm.memory.buffer, model.optionsAt, 40);
    this.numbers.forEach((x, i) => options.setFloat64(8 * i, x, true));
    this.whole.forEach((x, i) => options.setBigInt64(24 + 8 * i, BigInt.asIntN(64, x), true));
    library.call("draw", model.program, model.optionsAt, BigInt(this.count), model.logitsAt, library.cell);
    const token = library.number();
    state.add([token]), ++this.count;
    if (model.isEnd(token)) this.over = "the text is at its end";
    return { token, text: model.tokenizer && !this.over ? this.decoder.decode(model.bytesOf(token), { stream: true }) : "" };
  }

  async *[Symbol.asyncIterator]() {
    let since = performance.now();
    for (let next; (next = this.step()); ) {
      if (next.text) yield next.text;
      if (performance.now() - since < SLICE) continue;
      await nextTask();
      since = performance.now();
    }
    const rest = this.decoder.decode();
    if (rest) yield rest;
  }
}

/** Resolves when the browser has had time to draw and to take keys: by a message to itself, which waits for no clock. */
export function nextTask() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => (port1.close(), resolve());
    port2.postMessage(0);
  });
}
