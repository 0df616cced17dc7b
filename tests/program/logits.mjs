// What threads_alone.cpp reads and writes, by tarnn.wasm. Usage: node logits.mjs tarnn.js tarnn.wasm .SUFFIX FILE…
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const [script, wasm, suffix, ...files] = process.argv.slice(2);
const { load } = await import(pathToFileURL(fs.realpathSync(script)));
const runtime = new Uint8Array(fs.readFileSync(wasm));

/** A prompt of several blocks of rows, single tokens, a fork, and a prompt for some of the sequences: what all of them put out. */
function read({ library, program, vocabSize, numPositions, numOutputs }) {
  const long = numPositions > 1200, lengths = [long ? 1100 : 33, 2, long ? 530 : 19];
  const tokens = Array.from({ length: lengths[0] + lengths[1] + lengths[2] }, (_, i) => BigInt((7 * i * i + 3 * i) % vocabSize));
  const kept = [], place = (numbers) => {
    const at = library.room(8 * numbers.length);
    return new BigInt64Array(library.wasm.memory.buffer, at, numbers.length).set(numbers), at;
  };
  const at = place(tokens), counts = place(lengths.map(BigInt)), later = place([0n, 5n, 1n]), which = place([2n, 0n, 2n]);
  const keep = (name, ...given) => {
    const logits = library.room(12 * numOutputs);
    library.bytes(logits, 12 * numOutputs).fill(0);
    library.call(name, ...given, 1, logits);
    kept.push(Buffer.from(library.bytes(logits, 12 * numOutputs)));
  };
  const state = library.made("new", program, 3n);
  keep("read", state, at, counts);
  for (let i = 0; i < 3; ++i) keep("step", state, at + 8 * i);
  const fork = library.made("fork", state, which, 3n);
  keep("read", fork, at + 40, later);
  keep("step", state, at + 72);
  return Buffer.concat(kept);
}

for (const file of files) fs.writeFileSync(file + suffix, read(await load(new Uint8Array(fs.readFileSync(file)), { runtime })));
console.log("fine");
