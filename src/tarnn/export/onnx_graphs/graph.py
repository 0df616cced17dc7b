"""An ONNX graph in the making: nodes, and weights that several graphs share in one file."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

INLINE = 64  # numbers of a constant that stands in the graph itself
ALIGNED = 4096  # bytes: weights begin at a page, so that runtimes map them
IR_VERSION = 10
OPSET, OLD_OPSET = 27, 21  # of graphs in ONNX's own operators, and of those in Microsoft's
MICROSOFT = "com.microsoft"


class WeightFile:
    """The file of all weights, written as they come; equal ones are there once."""

    def __init__(self, path: Path):
        self.path, self._known, self._end = path, dict[str, TensorProto](), 0
        path.write_bytes(b"")

    def add(self, x: np.ndarray) -> TensorProto:
        """Return the tensor as an initializer whose numbers lie in the file."""
        data = np.ascontiguousarray(x).tobytes()
        key = hashlib.sha256(f"{x.dtype}{x.shape}".encode() + data).hexdigest()[:16]
        if key not in self._known:
            self._known[key] = self._written(f"w.{key}", x, data)
        return self._known[key]

    def _written(self, name: str, x: np.ndarray, data: bytes) -> TensorProto:
        start = -(-self._end // ALIGNED) * ALIGNED
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(data)
        self._end = start + len(data)
        kind = helper.np_dtype_to_tensor_dtype(x.dtype)
        proto = TensorProto(name=name, data_type=kind, dims=x.shape, data_location=TensorProto.EXTERNAL)
        for key, value in {"location": self.path.name, "offset": start, "length": len(data)}.items():
            proto.external_data.add(key=key, value=str(value))
        return proto


class Port(NamedTuple):
    """An input or an output: its name, its type, and its shape; texts are lengths that vary."""

    name: str
    kind: int
    shape: tuple[int | str, ...]


class Graph:
    """Nodes in their order. standard: in ONNX's own operators, else in those that onnxruntime had before them."""

    def __init__(self, weights: WeightFile, *, standard: bool):
        self.standard = standard
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []
        self._weights, self._nodes = weights, list[onnx.NodeProto]()
        self._initializers: dict[str, TensorProto] = {}
        self._made: dict[tuple[Any, ...], str] = {}  # what has been computed already

    def add(self, kind: str, *inputs: str, domain: str = "", name: str = "", **attributes: Any) -> str:
        """Append a node with one output, or return that of an equal one; "" stands for an input that is left out."""
        key = (kind, inputs, domain, name, *sorted((k, str(x)) for k, x in attributes.items()))
        if key not in self._made:
            self._made[key] = self.several(kind, *inputs, outputs=[name or ""], domain=domain, **attributes)[0]
        return self._made[key]

    def several(self, kind: str, *inputs: str, outputs: list[str], domain: str = "", **attributes: Any) -> list[str]:
        """Append a node; return its outputs. "" for a name that is made up."""
        number = len(self._nodes)
        names = [x or f"{kind.lower()}.{number}" + (f".{i}" if i else "") for i, x in enumerate(outputs)]
        node = helper.make_node(kind, list(inputs), names, name=f"{kind}.{number}", domain=domain, **attributes)
        self._nodes.append(node)
        return names

    def newer(self, kind: str, *inputs: str, outputs: list[str], **attributes: Any) -> list[str]:
        """Append a node of an operator that is ONNX's since opset 27, and was Microsoft's before."""
        domain = "" if self.standard else MICROSOFT
        return self.several(kind, *inputs, outputs=outputs, domain=domain, **attributes)

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """Return the name of a constant."""
        x = value.detach().numpy().astype(dtype) if isinstance(value, Tensor) else np.asarray(value, dtype)
        if x.size > INLINE:
            return self.weight(x)
        name = "c." + hashlib.sha256(f"{x.dtype}{x.shape}".encode() + x.tobytes()).hexdigest()[:12]
        self._initializers.setdefault(name, onnx.numpy_helper.from_array(x, name))
        return name

    def weight(self, x: Tensor | np.ndarray) -> str:
        """Return the name of a weight, in float32 if it is a tensor."""
        proto = self._weights.add(x.detach().to(torch.float32).numpy() if isinstance(x, Tensor) else x)
        self._initializers[proto.name] = proto
        return str(proto.name)

    def reshape(self, x: str, *shape: int) -> str:
        """Give another shape; 0 keeps a length, −1 is what is left."""
        return self.add("Reshape", x, self.constant(shape, np.int64))

    def sliced(self, x: str, start: int, end: int, axis: int = -1) -> str:
        """Take a part of an axis."""
        return self.add("Slice", x, *(self.constant([n], np.int64) for n in (start, end, axis)))

    def model(self, name: str) -> onnx.ModelProto:
        """Return the graph, under a name, with the operators that it takes."""
        inputs, outputs = (
            [helper.make_tensor_value_info(*port) for port in ports] for ports in (self.inputs, self.outputs)
        )
        graph = helper.make_graph(self._nodes, name, inputs, outputs, list(self._initializers.values()))
        opsets = [helper.make_opsetid("", OPSET if self.standard else OLD_OPSET)]
        opsets += [] if self.standard else [helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="tarnn")
