"""A guided tour: what is pending, what runs, and the kernel that runs it.

python examples/how_it_works.py
"""

from __future__ import annotations

import torch

import autofuse
from autofuse.supply.kernels import kernels


def show(title: str) -> None:
    print(f"\n== {title}")


def expression(x: autofuse.Tensor) -> str:
    """The recorded program behind a pending value, one op per line."""
    node = x._af
    lines = []
    for step in node.path():
        refs = [f"v{ref}" if 0 <= ref < 1 << 20 else f"input{~ref}" if ref < 0 else "scalar"
                for ref in step.args]  # fmt: skip
        lines.append(f"  v{step.index} = {step.op.name}({', '.join(refs)})")
    return "\n".join(lines)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    autofuse.config.always_fuse = True  # short chains of tensors as small as these too
    autofuse.config.compile = "now"  # on a GPU too: its first runs are otherwise eager's

    show("1. wrap: the same memory, another class")
    plain = torch.randn(4, 8, device=device)
    x = autofuse.wrap(plain)
    print("shares memory:", x.data_ptr() == plain.data_ptr(), "| pending:", autofuse.is_pending(x))

    show("2. ops are recorded, not run; shape and dtype are known at once")
    y = torch.sigmoid(x) * 2.0
    z = (y + x).tanh()
    print("pending:", autofuse.is_pending(z), tuple(z.shape), z.dtype)
    print(expression(z))

    show("3. reading a value runs the chain as one kernel")
    print("z[0, 0] =", float(z[0, 0]))
    print("pending:", autofuse.is_pending(z))
    stats = autofuse.stats()
    print(f"{stats.ops_recorded} ops, {stats.kernels_launched} kernel")

    show("4. what nobody holds never got memory")
    print(f"stored: {stats.live_outs_stored} values (y and z are held by name)")
    print(f"elided: {stats.nodes_elided} values, {stats.bytes_elided} bytes")

    show("5. the kernel's source, as compiled")
    print(kernels()[-1].source.text)

    show("6. the second time nothing is compiled, whatever the scalar and the size")
    autofuse.reset_stats()
    for size, scale in ((4, 3.0), (1000, 0.5), (77, -1.0)):
        t = autofuse.wrap(torch.randn(size, 8, device=device))
        u = torch.sigmoid(t) * scale
        autofuse.materialize((u + t).tanh(), u)
    print(f"compiled: {autofuse.stats().kernels_compiled}, launched: "
          f"{autofuse.stats().kernels_launched}")  # fmt: skip

    show("7. an op outside the table runs eagerly, and the next chain goes on from its result")
    autofuse.reset_stats()
    logits = (x * 2.0) @ plain.T
    probabilities = torch.softmax(logits - 1.0, -1) * 100.0
    print("pending again:", autofuse.is_pending(probabilities))
    autofuse.materialize(probabilities)
    print("flushes:", autofuse.stats().flushes)

    show("8. in-place ops rename the handle; an error is raised at its line")
    t = x * 1.0
    t += 1.0
    t.mul_(2.0)
    print("version counter:", t._version, "| pending:", autofuse.is_pending(t))
    try:
        t + torch.ones(3, device=device)
    except RuntimeError as error:
        print("RuntimeError:", str(error)[:60], "...")


if __name__ == "__main__":
    main()
