"""Does an installed tarnn compute with its compiled kernels, as the definitions say, and does its command run? No test framework
needed, but the extra `hf`.

python tests/smoke.py              the compiled kernels have to be there
python tests/smoke.py --plain      they have to be missing (no compiler was there): plain PyTorch, and one warning
"""

import platform
import subprocess
import sys
import tempfile
import warnings

import torch

import tarnn
from tarnn.data import byte_tokenizer
from tarnn.kernels.cpu import library
from tarnn.ops import hybrid_attention
from tarnn.ops.delta import definition as delta_definition
from tarnn.ops.linear import definition as linear_definition

PLAIN = sys.argv[1:] == ["--plain"]
torch.manual_seed(0)


def check(what: str, error: float, bound: float = 1e-12) -> None:
    print(f"  {what:20} error {error:.1e}")
    assert error < bound, what


def drawn() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 70, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tarnn.linear_attention(*drawn(), causal=True)
path, why = library.status()
print(f"tarnn {tarnn.__version__}, torch {torch.__version__}: {path} ({why})")
if PLAIN:
    assert path == "PyTorch", path
    assert "no compiled kernels" in why, why
    (warning,) = caught
    assert "C++ compiler" in str(warning.message), warning
else:
    assert path.startswith("compiled"), (path, why)
    assert (path == "compiled, baseline") == (platform.machine().lower() not in ("x86_64", "amd64")), path
    assert not caught, caught

for name, phi in {"elu": tarnn.Elu(), "favor": tarnn.PositiveRandomFeatures(8, 32, seed=0).double()}.items():
    q, k, v = drawn()
    o = tarnn.linear_attention(q, k, v, phi, causal=True)
    if name == "elu":
        expected = linear_definition.quadratic(phi(q), phi(k), v, causal=True)
        check("elu, forward", furthest([o], [expected]))
        weight = torch.randn_like(o)
        gradients = [torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (o, expected)]
        check("elu, backward", furthest(*gradients))
    past, state = tarnn.linear_attention(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], phi, causal=True, return_state=True)
    last, _ = tarnn.step(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], phi, state=state)
    check(f"{name}, step", furthest([torch.cat([past, last], 2)], [o]), 1e-10)

q, k, v = drawn()
with torch.no_grad():
    o = hybrid_attention(q, k, v, window=70, causal=True)
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
check("hybrid", furthest([o], [softmax]))

q, k, v = (x.detach() for x in drawn())
beta = torch.rand(q.shape[:3], dtype=q.dtype)
o = tarnn.delta_rule(q, k, v, beta, log_decay=-beta, normalize_qk=True, scale=1.0)
expected, _ = delta_definition.recurrent(q, k, v, beta, log_decay=-beta, norm_eps=1e-6, scale=1.0)
check("delta", furthest([o], [expected]))

config = tarnn.TarnnConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, attention=["linear", "softmax"])
model = tarnn.TarnnForCausalLM(config).eval()
ids = torch.randint(config.vocab_size, (1, 9))
with torch.no_grad():
    written = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    logits = model(written).logits[:, 8:-1]
check("generate", (logits.max(-1).values - logits.gather(-1, written[:, 9:, None])[..., 0]).max().item(), 1e-4)

# a folder, opened as `tarnn.load` and the command open it
model = tarnn.TarnnForCausalLM(tarnn.TarnnConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)).eval()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    lm = tarnn.load(folder)
    ids = torch.randint(97, 123, (1, 30))
    with torch.no_grad():
        check("load", (lm.logits(ids) - model(ids).logits).abs().max().item(), 1e-4)
    text = "".join(lm.generate("Call me", max_new_tokens=9, seed=7))
    command = [sys.executable, "-m", "tarnn"]
    for arguments in (
        ["info"],
        ["info", folder],
        ["generate", folder, "--prompt", "Call me", "--max-new-tokens", "9", "--seed", "7"],
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert text in done.stdout, (text, done.stdout)
    print(f"  tarnn info, generate  {text!r}")
print("all right")
