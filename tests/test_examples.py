"""The examples and the benchmark run as a user would run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_char_rnn():
    out = run("examples/char_rnn.py", "--steps", "12", "--device", "cpu")
    assert "losses agree: True" in out and "sampled text agrees: True" in out
    assert len(re.findall(r"steps/s, (?:first|second) half: eager \d\S+, fused \d", out)) == 2
    assert re.search(r"a step now runs (fused, in [1-9]\d* launches|plain: \w)", out)
    recorded, launched = map(int, re.findall(r"(\d+) ops recorded, (\d+) kernels", out)[-1])
    assert recorded >= 4 * launched > 0
    assert int(re.search(r"(\d+) bytes of intermediates", out).group(1)) > 0


def test_rnn_loop():
    out = run("examples/rnn_loop.py", "--iterations", "50", "--device", "cpu")
    assert "250 ops in 50 kernels" in out


@pytest.mark.parametrize("drawn", [False, True])
def test_wave(drawn, tmp_path):
    """With matplotlib and without, which does not keep it from computing."""
    if drawn:
        pytest.importorskip("matplotlib", reason="draws with the extra '.[examples]'")
    path = tmp_path / "wave.png"
    few = ["--steps", "90", "--size", "120", "300", "--device", "cpu", "--out", str(path)]
    script = ["-c", "import runpy, sys\n" + "sys.modules['matplotlib'] = None\n" * (not drawn)
              + "sys.argv.pop(0), runpy.run_path(sys.argv[0], run_name='__main__')"]  # fmt: skip
    out = run(*script, "examples/wave.py", *few)
    recorded, launched = map(int, re.search(r"(\d+) ops recorded, (\d+)", out).groups())
    assert "same bits" in out and recorded == 15 * launched > 0
    assert path.exists() == drawn and ("no picture" in out) != drawn


def test_how_it_works():
    out = run("examples/how_it_works.py")
    assert "v3 = tanh(v2)" in out and "5 ops, 1 kernel" in out and "compiled: 0, launched: 3" in out


def test_foreign_model():
    pytest.importorskip("transformers", reason="a model of another package: '.[test-models]'")
    out = run("examples/foreign_model.py", "--device", "cpu")
    assert "largest difference from eager: 0\n" in out
    assert "ops seen" in out and "modeling_llama.py" in out and "little to gain" in out


def test_explain_notebook(tmp_path, monkeypatch):
    """From top to bottom, with the page of a report in it; it is kept without outputs."""
    nbclient = pytest.importorskip("nbclient", reason="runs notebooks with '.[notebook]'")
    pytest.importorskip("ipykernel", reason="runs notebooks with '.[notebook]'")
    import nbformat

    text = (ROOT / "examples/explain.ipynb").read_text()
    notebook = nbformat.reads(text, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
              "display_name": "tests", "language": "python"}  # fmt: skip
    place = tmp_path / "kernels" / "tests"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="tests")
    client.execute(cwd=str(tmp_path))
    outputs = [output for cell in cells for output in cell.outputs]
    shown = [output.data for output in outputs if "data" in output]
    with_look, without = (data["text/html"] for data in shown if "text/html" in data)
    assert (
        "waits 40: highest = max(highest, price.max().item())" in with_look
        and "Cell In[2]" in with_look
    )
    assert "reads a value every step (40 times)" in with_look and "ipykernel" not in with_look
    assert "waits 40" not in without and "every step" not in without
    said = "".join(output.get("text", "") for output in outputs)
    assert "without: 20 kernels, median chain 32 ops, 0 reads" in said and "def af_" in said


def test_cold_start():
    options = ("--processes", "1", "--seconds", "0", "--workload", "RNN step")
    out = run("bench/cold_start.py", "--device", "cpu", *options)
    assert len(re.findall(r"first 5 \d", out)) == 3 and out.count("import s") == 2
    out = run("bench/cold_start.py", "--imports", "--processes", "1")
    assert len(re.findall(r"least \d+ ms", out)) == 3


def test_overhead():
    out = run("bench/overhead.py", "--device", "cpu", "--rounds", "2", "--iterations", "10",
              "--large", "4096", "--sizes", "20")  # fmt: skip
    assert out.count("ratio") == 109 and "hit rate" in out and "against copy" in out
    costs = r"(eager|fused), (engine|caller|checkpoint): a chain \S+ us and \S+ us per op"
    assert len(re.findall(costs, out)) == 6
    assert out.count("beside its ops") == 3 and "left alone" in out


def test_passing():
    out = run("bench/passing.py", "--device", "cpu", "--rounds", "1", "--iterations", "2")
    assert len(re.findall(r"(?m)^.*\d +[+-]\d.*$", out)) == 137 and "torch.cat([x, x])" in out
    assert "stays, more" in out


def test_training():
    out = run("bench/training.py", "--device", "cpu", "--rounds", "1", "--steps", "3", "--threads",
              "--only", "chain of")  # fmt: skip
    assert out.count("same bits") == 5 and out.count("forward + backward") == 20
    assert out.count("eager, caller") == out.count("autofuse, engine") == 5


def test_cpu():
    out = run("bench/cpu.py", "exp", "tanh", "--size", "4096", "--rounds", "1")
    assert out.count("ratio") == 2 and "slower than eager" in out


def test_classes():
    out = run("bench/classes.py", "--device", "cpu", "--rounds", "1", "--iterations", "1",
              "--size", "5x40", "--size", "3x33")  # fmt: skip
    assert out.count("bits same") == 8 and "of that autofuse" in out


def test_every_benchmark_has_a_test():
    """Run as a user would, or imported by tests of its own."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in (ROOT / "bench").glob("*.py"):
        imported = f"import {path.stem}\n" in tests or f"from {path.stem} import" in tests
        assert imported or f'"bench/{path.name}"' in tests, path.name


def test_every_example_has_a_test():
    tests = Path(__file__).read_text()
    for path in (ROOT / "examples").glob("*.[pi]*"):
        assert f'"examples/{path.name}"' in tests
