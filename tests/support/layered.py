"""Transformer-like OpGraphs of any length, made without PyTorch: 12 ops per layer, and 4 more."""

from pipeloom.ir.graph import Op, OpGraph, Parameter, Value

DTYPE, WORDS = "bfloat16", 32_000


def layered(layers: int, *, hidden: int = 1024, length: int = 512, rows: int = 4) -> OpGraph:
    """A graph of 4 + 12 * layers ops, named as a captured Llama's would be."""
    made = _Making(hidden, length, rows)
    x = made.op("embed", "aten.embedding.default", ["ids"], hidden, "embed", weight=(WORDS, hidden))
    for k in range(layers):
        x = made.layer(x, f"layers.{k}")
    x = made.op("norm", "aten.rms_norm.default", [x], hidden, "norm", weight=(hidden,))
    x = made.op("head", "aten.linear.default", [x], WORDS, "head", weight=(WORDS, hidden))
    made.op("loss", "aten.nll_loss_forward.default", [x], 0, "")
    ids = Value(name="ids", shape=(rows, length), dtype="int64")
    given = {"inputs": (ids,), "parameters": tuple(made.parameters), "buffers": (), "loss": "loss"}
    return OpGraph(name=f"layered-{layers}", ops=tuple(made.ops), **given)


class _Making:
    def __init__(self, hidden: int, length: int, rows: int) -> None:
        self.hidden, self.length, self.rows = hidden, length, rows
        self.ops: list[Op] = []
        self.parameters: list[Parameter] = []

    def op(
        self, name: str, target: str, inputs: list[str], width: int, module: str, weight: tuple[int, ...] = ()
    ) -> str:
        shape = (self.rows, self.length, width) if width else ()
        value = Value(name=name, shape=shape, dtype=DTYPE if width else "float32", needs_grad=True)
        params: tuple[str, ...] = ()
        if weight:
            params = (f"{module}.weight",)
            self.parameters.append(Parameter(name=params[0], shape=weight, dtype=DTYPE))
        self.ops.append(
            Op(name=name, target=target, inputs=tuple(inputs), outputs=(value,), params=params, module=module)
        )
        return name

    def layer(self, x: str, name: str) -> str:
        h, wide = self.hidden, 4 * self.hidden
        p = name.replace(".", "_")

        def linear(part: str, source: str, out: int, into: int) -> str:
            target = "aten.linear.default"
            return self.op(f"{p}_{part}", target, [source], out, f"{name}.{part}", weight=(out, into))

        n1 = self.op(f"{p}_n1", "aten.rms_norm.default", [x], h, f"{name}.n1", weight=(h,))
        q, k, v = (linear(part, n1, h, h) for part in ("q", "k", "v"))
        target = "aten.scaled_dot_product_attention.default"
        mixed = self.op(f"{p}_attention", target, [q, k, v], h, f"{name}.attention")
        out = linear("o", mixed, h, h)
        x = self.op(f"{p}_add1", "aten.add.Tensor", [x, out], h, name)
        n2 = self.op(f"{p}_n2", "aten.rms_norm.default", [x], h, f"{name}.n2", weight=(h,))
        up = linear("up", n2, wide, h)
        act = self.op(f"{p}_act", "aten.silu.default", [up], wide, f"{name}.act")
        down = linear("down", act, h, wide)
        return self.op(f"{p}_add2", "aten.add.Tensor", [x, down], h, name)
