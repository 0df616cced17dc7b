"""Folders of transformers' families are served as our own are: what the folder says, and what a killed server kept."""

import asyncio
import json
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
from support.kill_serve import served_by_a_process
from support.open_folders import PACKED_AND_SERVED, make_folder
from support.served import NO_ENDS, alone, answer, prompt
from transformers import AutoTokenizer

from tarnn.cli.main import main
from tarnn.program.packing import VERSION
from tarnn.serving.engine import Engine
from tarnn.serving.http.chat_template import opened
from tarnn.serving.http.prompts import prompt_ids
from tarnn.serving.http.request_schemas import CompletionRequest
from tarnn.serving.http.to_engine import sampling_of
from tarnn.serving.model import open_served, sizes_of
from tarnn.serving.request import Request, Sampling
from tarnn.serving.state_info import UnfitState
from tarnn.serving.store import StateStore

ASK = [{"role": "user", "content": "Who is Ishmael?"}]


def test_weights_ends_and_template_are_the_folders(tmp_path):
    """Opened in bfloat16, ended by generation_config.json, asked by its own template."""
    model = open_served(make_folder(tmp_path / "tiny", "Qwen3.5", torch.bfloat16))
    assert model.key.weights == "bfloat16"
    assert model.model.end_ids == {257, 259}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    wanted = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    assert opened(model, ASK)[0].tolist() == wanted
    sizes = sizes_of(model)
    assert sizes.state_bytes + 9 * sizes.state_bytes_per_token == model.model.new_state(1, 9).nbytes
    request = Request(prompt(9), 40, Sampling(temperature=0))
    with Engine(model) as engine:
        [(_, tokens, finish, _)] = answer(engine.submit(request))
    assert tokens == alone(model, request)[0]
    assert (finish == "stop") == (tokens[-1] in (257, 259))


@pytest.mark.parametrize("family", ["Qwen3.5", pytest.param("Llama", marks=pytest.mark.slow)])
def test_a_killed_server_goes_on(tmp_path, family):
    """After kill −9 a state that was held is continued to the same bits, and a conversation is answered with the same."""
    folder, chat = make_folder(tmp_path / "tiny", family), {"messages": ASK, "max_tokens": 9, "temperature": 0}
    chat |= {"logprobs": True, "top_logprobs": 3}
    with served_by_a_process(folder, tmp_path / "states") as (process, address):
        first = post(address, "/v1/chat/completions", chat)
        held = post(address, "/v1/states", {"text": "Call me Ishmael. " * 9})
        before = post(address, "/v1/completions", {"state": held["id"], "prompt": "Some", "max_tokens": 9, "seed": 3})
        process.kill()
        process.wait()
    with served_by_a_process(folder, tmp_path / "states") as (_, address):
        again = post(address, "/v1/chat/completions", chat)
        after = post(address, "/v1/completions", {"state": held["id"], "prompt": "Some", "max_tokens": 9, "seed": 3})
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == held["tokens"] == 17 * 9
    assert again["choices"] == first["choices"]
    assert after["choices"] == before["choices"]


def post(address, path, body):
    return httpx.post(address + path, json=body, timeout=60).raise_for_status().json()


@pytest.mark.parametrize("family", PACKED_AND_SERVED)
def test_a_second_turn_reads_its_own_tokens(tmp_path, family):
    """Behind 2,100 tokens, and written as if all had been read again, to the bit: after a restart, too."""
    served = open_served(make_folder(tmp_path / "tiny", family, max_position_embeddings=4096))
    assert served.key.products == f"program-{VERSION}"
    first = Request(prompt(2100), 9, Sampling(seed=1), end_ids=NO_ENDS, keep=True)
    tokens, _, _ = alone(served, first)
    history = np.concatenate([first.prompt, np.array(tokens, np.int32)])
    second = Request(np.concatenate([history, prompt(20, seed=1)]), 12, Sampling(seed=2), end_ids=NO_ENDS, keep=True)
    wanted, logits, _ = alone(served, second)
    for restart in range(2):
        store = StateStore(served, folder=tmp_path / "states", memory=10**8)
        with Engine(served, store=store) as engine:
            if not restart:
                [(_, written, _, snapshot)] = answer(engine.submit(first))
                store.hold("", snapshot)
                assert written == tokens
            stream = engine.submit(second)
            [(_, written, _, snapshot)] = answer(stream)
            assert stream.usage.cached_tokens >= len(history) - 1
            assert written == wanted
            assert torch.equal(snapshot.logits, logits)
        store.close()


def test_states_of_the_old_kind_are_refused_and_kept(tmp_path):
    """A state that was held by a step over a model's modules: a sentence, no other answer, and its file stays."""
    served = open_served(make_folder(tmp_path / "tiny", "Llama"))
    old = replace(served, key=served.key._replace(fingerprint="of modules", products="fused"))
    for number, model in enumerate((old, served, old)):
        store = StateStore(model, folder=tmp_path / "states", memory=10**7)
        try:
            if number == 0:
                with Engine(model, store=store) as engine:
                    request = Request(prompt(40), 3, Sampling(seed=1), end_ids=NO_ENDS, keep=True)
                    [(_, _, _, snapshot)] = answer(engine.submit(request))
                held = store.hold("", snapshot).id
                file = store.export("", held)
            elif number == 1:
                with pytest.raises(UnfitState, match="was made with steps of the kind fused; this server has others"):
                    store.get("", held)
                with pytest.raises(UnfitState):
                    store.add("", file)
            else:
                assert torch.equal(store.get("", held).logits, snapshot.logits)
        finally:
            store.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A Llama with windows and features, and a head in its second layer that keeps all keys."""
    folder = tmp_path_factory.mktemp("converted")
    llama = make_folder(folder / "llama", "Llama", max_position_embeddings=512)
    (folder / "a.txt").write_text("Wunderland ist ueberall. " * 60)
    options = ["--window", "8", "--sinks", "2", "--features", "8", "--num-texts", "3", "--length", "40"]
    options += ["--mode", "features", "--exact-layers", "1"]
    assert main(["convert", str(llama), str(folder / "out"), "--texts", str(folder / "a.txt"), *options]) == 0
    return open_served(folder / "out")


def test_a_converted_model_is_served_alike(converted, tmp_path):
    """In company as alone, and after a restart from its states on the disk, to the bit."""
    assert sizes_of(converted).state_bytes_per_token > 0
    requests = [Request(prompt(5 + 9 * i, seed=i), 12, Sampling(seed=i), end_ids=NO_ENDS, keep=True) for i in range(6)]
    expected = [alone(converted, request)[:2] for request in requests]
    for restart in range(2):
        store = StateStore(converted, folder=tmp_path, memory=10**7)
        with Engine(converted, store=store, prefill_piece=7) as engine:
            streams = [engine.submit(request) for request in requests]
            for stream, (tokens, logits), request in zip(streams, expected, requests):
                [(_, written, finish, snapshot)] = answer(stream)
                assert (written, finish) == (tokens, "length")
                assert torch.equal(snapshot.logits, logits)
                assert stream.usage.cached_tokens == (len(request.prompt) if restart else 0)
                if not restart:
                    store.hold("", snapshot)
        store.close()


def test_requests_that_say_nothing_sample_as_the_folder_says(tmp_path):
    folder = make_folder(tmp_path / "tiny", "Qwen3")
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 257}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = open_served(folder).model
    body = CompletionRequest.model_validate({"prompt": "x", "temperature": 0, "min_p": 0.1})
    assert sampling_of(body, model) == Sampling(temperature=0, top_k=20, min_p=0.1)
    body = CompletionRequest.model_validate({"prompt": "x"})
    assert sampling_of(body, model) == Sampling(temperature=0.6, top_k=20)


def test_a_text_begins_as_its_tokenizer_says(tmp_path):
    """A completion's prompt gets <|bos|> in front, as transformers' tokenizer puts it; what goes on from a state does not."""
    model = open_served(make_folder(tmp_path / "tiny", "Llama", begins=True))
    wanted = AutoTokenizer.from_pretrained(tmp_path / "tiny")("Call me")["input_ids"]
    assert asyncio.run(prompt_ids(model, "Call me", "prompt", most=99)).tolist() == wanted
    assert asyncio.run(prompt_ids(model, "Call me", "prompt", most=99, goes_on=True)).tolist() == wanted[1:]
    assert asyncio.run(prompt_ids(model, "", "prompt", most=99)).tolist() == wanted[:1]
