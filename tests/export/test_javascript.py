"""tarnn.js and tarnn.wasm in node: the numbers of the native runtime, states as values, memory that does not grow."""

import json

import pytest
import torch
from support import javascript as js
from support.c_library import RUN
from support.drawn_programs import VOCABULARY, drawn_program
from support.open_folders import make_folder
from support.same_logits import LIMITS

import tarnn
from tarnn.data.tokenizers import byte_tokenizer, train_bpe
from tarnn.decoding.pack import pack_folder
from tarnn.decoding.packed_file import write_packed
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.program.outline import outline_of
from tarnn.program.packing import pack
from tarnn.program.runtime import Runtime

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used"),
    pytest.mark.skipif(not js.is_there(), reason=js.MISSING),
]
# a processor that multiplies bfloat16 rounds activations to it; WebAssembly does not
LIMITS = LIMITS | {"bfloat16": 0.02}
CLOSE = 1e-4  # between the two likeliest tokens: nearer ones may change places by rounding


def make_own(folder, tokenizer, **config):
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **config}
    model = TarnnForCausalLM(TarnnConfig(vocab_size=len(tokenizer), **fields))
    with torch.no_grad():
        model.get_output_embeddings().weight *= 20
        model.get_output_embeddings().weight[-1] = 0  # texts seldom end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("javascript")
    pack_folder(make_own(folder / "own", byte_tokenizer()), folder / "x.tarnn", "float32")
    return folder / "x.tarnn"


def up_to_a_near_tie(lm, ids, others):
    """Two continuations are equal up to the first token whose two best logits are close; return where they part."""
    for i, (one, other) in enumerate(zip(ids[-len(others) :], others, strict=True)):
        if one == other:
            continue
        logits = lm.read(torch.tensor(ids[: len(ids) - len(others) + i])).logits[0]
        first, second = logits.topk(2).values.tolist()
        assert first - second < CLOSE, f"token {i} differs: {first - second}"
        return i
    return len(others)


@pytest.mark.parametrize("weights", LIMITS)
@pytest.mark.parametrize("seed", range(10))
def test_drawn_programs_give_the_logits_of_the_native_runtime(tmp_path, seed, weights):
    """Programs of all kinds of instructions, read in pieces; the bits are compared by tests/wasm.sh."""
    program = drawn_program(seed)
    write_packed(tmp_path / "x.tarnn", pack(program, weights), {"outline": outline_of(program)}, {})
    runtime = Runtime(program, weights)
    ids = torch.randint(VOCABULARY, (30,), generator=torch.Generator().manual_seed(seed))
    expected = runtime.prefill(ids[None], runtime.new_state(1, 30))[0][0]
    got = js.run(f"""
        const model = await open("{tmp_path}/x.tarnn"), ids = {ids.tolist()};
        const state = model.read(ids.slice(0, 11));
        state.add(ids.slice(11));
        return [...state.logits()]""")
    assert float((torch.tensor(got) - expected).abs().max() / expected.abs().max()) < LIMITS[weights]


@pytest.mark.parametrize("family", ["own", "Llama", "Qwen3.5"])
def test_the_tokens_of_models(tmp_path, file, family):
    """Greedily, 300 tokens in float32, up to the first near tie."""
    if family != "own":
        file = tmp_path / "x.tarnn"
        pack_folder(make_folder(tmp_path / "folder", family), file, "float32")
    lm, ids = tarnn.load(file), [3, 1, 4, 1, 5, 9]
    got = js.run(f"""
        const writing = (await open("{file}")).generate({ids}, {{ temperature: 0, maxNewTokens: 300 }}), tokens = [];
        for (let next; (next = writing.step()); ) tokens.push(next.token);
        return tokens""")
    writing = lm.generate(ids, max_new_tokens=300, temperature=0)
    "".join(writing)
    expected = [*ids, *writing.ids[: len(got)]]
    assert len(got) == len(writing.ids) > 20 or len(got) > 20
    assert up_to_a_near_tie(lm, expected, got[: len(expected) - len(ids)]) > 10


def test_the_text_of_a_seed(tmp_path):
    """Drawn tokens, characters of several tokens, an empty prompt; through a tokenizer with merges."""
    learnt = "Call me Ishmael. Some years ago, it's said: 12 日本語 über\n"
    pack_folder(make_own(tmp_path / "own", train_bpe([learnt.encode() * 9], 300)), tmp_path / "x.tarnn", "float32")
    for prompt, options in (
        ("Call me", {"seed": 7}),
        ("it's 日", {"seed": 2**32 + 5, "temperature": 0.8, "topK": 9}),
        ("", {"seed": 1}),
    ):
        got = js.run(f"""
            let text = "";
            const model = await open("{tmp_path}/x.tarnn");
            const writing = model.generate({json.dumps(prompt)}, {{ ...{json.dumps(options)}, maxNewTokens: 80 }});
            for await (const piece of writing) text += piece;
            return text""")
        named = {"top_k" if name == "topK" else name: x for name, x in options.items()}
        assert got == "".join(tarnn.load(tmp_path / "x.tarnn").generate(prompt, max_new_tokens=80, **named))


def test_a_character_of_several_tokens(file):
    """It comes out whole, with its last byte; the tokens are put in the place of those that are drawn."""
    pieces = js.run(f"""
        const model = await open("{file}"), call = model.library.call.bind(model.library), tokens = [0xe6, 0x97, 0xa5, 0x41];
        model.library.call = (name, ...given) => {{
          call(name, ...given);
          if (name === "draw") new DataView(model.library.wasm.memory.buffer).setUint32(model.library.cell, tokens.shift(), true);
        }};
        const writing = model.generate("Call me", {{ maxNewTokens: 4 }});
        return [0, 1, 2, 3].map(() => writing.step().text)""")
    assert pieces == ["", "", "日", "A"]


def test_states_are_values(file):
    """A fork, a state that was kept, and the text whole go on alike; what they came from stays as it was."""
    whole, of_fork, of_kept, again, sizes, position = js.run(f"""
        const model = await open("{file}");
        const rest = async (state, n) => {{
          let text = "";
          for await (const piece of model.generate([], {{ state, maxNewTokens: n, temperature: 0 }})) text += piece;
          return text;
        }};
        const state = model.read("Call me"), kept = await state.blob().arrayBuffer();
        const whole = await rest(state, 40), other = model.read(" Ishmael", state);
        const other_size = other.size;
        const opened = model.open(kept);
        const of_fork = await rest(state.fork(), 40), of_kept = await rest(opened, 40);
        other.free(), other.free();
        return [whole, of_fork, of_kept, await rest(state, 40), [state.size, other_size, kept.byteLength], opened.position]""")
    assert whole == of_fork == of_kept == again
    assert len(set(sizes)) == 1
    assert position == len("Call me")


@pytest.mark.skipif(not RUN.exists(), reason="there is no tarnn-run beside the compiled kernels")
def test_a_state_of_the_command_line(file, tmp_path):
    import subprocess

    subprocess.run([RUN, file, "Call me", "--max-new-tokens", "0", "--state-out", tmp_path / "s"], check=True)
    position, same = js.run(f"""
        const model = await open("{file}"), state = model.open(bytes("{tmp_path}/s").buffer.slice(0));
        return [state.position, model.read("Call me").size === state.size]""")
    assert (position, same) == (7, True)


def test_memory_stays_flat(file):
    """Over many tokens, forks, and failures."""
    before, after = js.run(f"""
        const model = await open("{file}"), memory = () => model.library.wasm.memory.buffer.byteLength;
        const writing = model.generate("Call me", {{ maxNewTokens: Infinity, seed: 1 }});
        const some = (n) => {{ for (let i = 0; i < n; ++i) writing.step() ?? (writing.over = ""); }};
        const used = () => {{
          for (let i = 0; i < 300; ++i) {{
            const fork = writing.state.fork();
            model.open(fork.bytes()).free(), fork.free();
            try {{ model.open(new Uint8Array(100)) }} catch {{}}
            try {{ model.read([-1, 3]) }} catch {{}}
          }}
        }};
        some(1000), used();
        const before = memory();
        for (let i = 0; i < 20; ++i) some(1000), used();
        return [before, memory()]""")
    assert before == after


def test_what_it_refuses(file, tmp_path):
    def refused(words, body):
        sentence = js.fails(body)
        assert words in sentence, sentence
        assert sentence.endswith(".")

    newer = tmp_path / "newer.tarnn"
    newer.write_bytes(file.read_bytes().replace(b'"format_version": "2"', b'"format_version": "9"'))
    refused("has version 9 of packed files; this library reads version 2", f'await open("{newer}")')
    refused("is no packed file", f'await load(bytes("{file}").slice(0, 100), {{ runtime: bytes("{js.WASM}") }})')
    refused("has no SIMD", f'WebAssembly.validate = () => false; await open("{file}")')
    refused("has no WebAssembly", f'delete globalThis.WebAssembly; await open("{file}")')
    twice = f'const {{ library }} = await open("{file}"); for (const i of [0, 1]) library.room(2 ** 31, "this model")'
    refused("there is no memory for this model (2147.5 MB)", twice)
    refused("there is no memory for this model", f'(await open("{file}")).library.room(2 ** 33, "this model")')
    refused("from 0 to 256; got 257", f'(await open("{file}")).read([257, 3])')
    refused("nothing was read yet", f'(await open("{file}")).generate([]).step()')
    refused("no saved state", f'(await open("{file}")).open(new Uint8Array(4))')
    refused("are no saved state", f'(await open("{file}")).open(new Uint8Array(400))')
    refused("damaged", f'const m = await open("{file}"), b = m.read("Call me").bytes(); b[200] ^= 1; m.open(b)')
    refused("top_p must be above 0", f'(await open("{file}")).generate("a", {{ topP: 2 }}).step()')
    pack_folder(make_folder(tmp_path / "folder", "Llama"), tmp_path / "x.tarnn", "float32")
    (tmp_path / "missing").mkdir()
    refused("can't be fetched", f'await load("file://{tmp_path}/missing/x.tarnn", {{ runtime: bytes("{js.WASM}") }})')
