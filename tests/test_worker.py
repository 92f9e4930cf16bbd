"""The background compiler where something goes wrong: foreign files, odd answers, dying workers."""

import io
import os
import sys
import time

import pytest
import torch
from test_tiers import ask, cold, jobs, run  # noqa: F401

import autofuse
from autofuse import hooks
from autofuse.cli.diagnose import facts
from autofuse.supply import kernels as compile
from autofuse.supply import service as background
from autofuse.supply import worker
from autofuse.supply.disk import DiskCache
from autofuse.supply.service import FAILURES, Job, Service
from autofuse.supply.toolchain import Built
from support import assert_same

STDLIB = (
    "signal os json queue struct types hashlib ast platform sitecustomize usercustomize".split()
)


@pytest.fixture
def service(tmp_path):
    background.lost.clear()
    made = Service(1, DiskCache(tmp_path / "own"))
    yield made
    made.close()
    background.lost.clear()


@pytest.fixture
def short(monkeypatch):
    """No pauses."""
    monkeypatch.setattr(background, "PAUSES", (0.0, 0.0))


def lying(text):
    """BOOT of a worker that begins as others do and then runs `text`, with `hello` and `send`."""
    head = "from autofuse.supply.worker import send, receive\nhello = receive(sys.stdin.buffer)\n"
    return background.BOOT.replace("main(answers, library)", head + text)


# --- what the process runs -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["here", "in front", "PYTHONPATH", "PYTHONSAFEPATH"])
def test_modules_of_the_working_directory_do_not_run(service, how, tmp_path, monkeypatch):
    """Nor those of the program that are called as the standard library's."""
    for name in STDLIB:
        mark = tmp_path / f"{name}.ran"
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    if how == "in front":
        monkeypatch.setattr(sys, "path", ["", str(tmp_path), ".", *sys.path])
    elif how == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), "", "."]))
    elif how == "PYTHONSAFEPATH":
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    answer = ask(service, jobs(1)[0])
    assert answer.built and not answer.error
    assert not [*tmp_path.glob("*.ran")]


def test_what_a_worker_prints_is_no_answer(service, monkeypatch):
    noise = "print('noise'); os.write(1, b'noise'); os.system('echo noise')\n"
    noisy = background.BOOT.replace("import site", noise + "import site")
    monkeypatch.setattr(background, "BOOT", noisy)
    assert ask(service, jobs(1)[0]).built and not background.lost


# --- answers that are none -----------------------------------------------------------------------


def frame(header, payload=b""):
    stream = io.BytesIO()
    worker.send(stream, header, payload)
    return stream.getvalue()


def test_frames_arrive_as_they_were():
    data = frame({"a": 1}, b"bytes") + frame({})
    stream = io.BytesIO(data)
    assert worker.receive(stream) == ({"a": 1}, b"bytes")
    assert worker.receive(stream) == ({}, b"") and worker.receive(stream) is None


def test_no_damaged_frame_is_taken():
    data = frame({"built": True}, b"binary")
    for k in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[k // 8] ^= 1 << k % 8
        with pytest.raises(worker.FrameError):
            worker.receive(io.BytesIO(bytes(flipped)))
    for k in range(1, len(data)):
        with pytest.raises(worker.FrameError):
            worker.receive(io.BytesIO(data[:k]))
        with pytest.raises(worker.FrameError):
            worker.receive(io.BytesIO(data[k:]))


def test_a_frame_of_any_length_is_not_waited_for():
    """Its lengths are looked at before anything is read, or kept."""
    for lengths in ((worker.MOST_TEXT + 1, 0), (0, worker.MOST_BYTES + 1), (2**32 - 1, 2**32 - 1)):
        head = worker._HEAD.pack(worker._MARK, *lengths, bytes(32))
        with pytest.raises(worker.FrameError, match="bytes"):
            worker.receive(io.BytesIO(head))


def test_a_stream_may_take_frames_in_parts():
    class Narrow(io.BytesIO):
        def write(self, data):
            return super().write(bytes(data[:7]))

    stream = Narrow()
    worker.send(stream, {"a": 1}, b"x" * 100)
    assert worker.receive(io.BytesIO(stream.getvalue())) == ({"a": 1}, b"x" * 100)


ANSWERS = {
    "noise": "answers.write(b'hello\\n' * 100); answers.flush()",
    "other lengths": "answers.write(b'autofuse' + b'\\xff' * 400); answers.flush()",
    "no object": "import json; json.dumps = lambda x: '[1]'; send(answers, {})",
    "nothing in it": "send(answers, {})",
    "no binary": "send(answers, {'built': True, 'unsaved': ''})",
    "other types": "send(answers, {'built': 'yes', 'unsaved': 3}, b'binary')",
    "an end": "sys.exit(9)",
    "half of it": "import io; s = io.BytesIO(); send(s, {'built': True}, b'x' * 99)\n"
    "answers.write(s.getvalue()[:60]); answers.flush(); os._exit(1)",
    "silence": "import time; time.sleep(60)",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_none_fails_its_job_alone(service, name, monkeypatch):
    first, second = jobs(2)
    with monkeypatch.context() as patch:
        text = f"send(answers, {{'ready': True}})\nreceive(sys.stdin.buffer)\n{ANSWERS[name]}\n"
        patch.setattr(background, "BOOT", lying(text))
        if name == "silence":
            patch.setattr(background, "HANG_SECONDS", 0.5)
        answer = ask(service, first)
    assert "died or did not answer" in answer.error and not answer.binary
    assert sum(background.lost.values()) == 1 and not service.running
    assert ask(service, second).built and service.lost == 0


def test_a_binary_that_is_damaged_on_its_way_is_not_loaded(service, monkeypatch):
    real = worker._read

    def read(stream, count):
        data = real(stream, count)
        return data if count < 200 else bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(worker, "_read", read)
    assert "have changed" in ask(service, jobs(1)[0]).error


@pytest.mark.parametrize("where", ["receive", "send", "Built"])
def test_no_memory_fails_one_job(service, where, monkeypatch):
    first, second = jobs(2)
    ask(service, first)

    def nothing_left(*args):
        raise MemoryError("nothing left")

    with monkeypatch.context() as patch:
        patch.setattr(background, where, nothing_left if where != "Built" else once(Built))
        assert "nothing left" in ask(service, second).error
    assert ask(service, first).binary


def once(make):
    """`make`, but for the first call."""
    failed = []

    def call(*args, **kwargs):
        if not failed:
            failed.append(True)
            raise MemoryError("nothing left")
        return make(*args, **kwargs)

    return call


@pytest.mark.parametrize("where", ["load", "_keep", "listener"])
def test_wait_returns_whatever_fails_in_taking_a_kernel(where, monkeypatch, capsys):
    def broken(*args):
        raise MemoryError("nothing left")

    if where == "listener":
        monkeypatch.setattr(hooks, "looked_up", lambda made, *args: made and broken())
    else:
        monkeypatch.setattr(compile, where, broken)
    x = torch.randn(64)
    run(x)
    assert autofuse.wait(30)
    monkeypatch.undo()
    run(x)
    stats = autofuse.stats()
    assert (stats.kernels_launched, stats.replays) == ((1, 0) if where == "listener" else (0, 1))
    assert "nothing left" in capsys.readouterr().err or where == "load"
    autofuse.config.compile, autofuse.config.compile_after = "background", 1
    assert_same(autofuse.materialize(autofuse.wrap(x) * 5 - 2), x * 5 - 2, None)
    assert autofuse.wait(30)  # the thread is still there
    assert_same(autofuse.materialize(autofuse.wrap(x) * 5 - 2), x * 5 - 2, None)
    assert autofuse.stats().kernels_launched == stats.kernels_launched + 1


# --- workers that do not start -------------------------------------------------------------------


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_that_dies_in_its_start_is_tried_again(
    service, deaths, tmp_path, monkeypatch, short
):
    marks = f"""
import os, sys
path = {str(tmp_path / "starts")!r}
with open(path, "a") as file: file.write("x")
if len(open(path).read()) <= {deaths}: raise SystemExit("too early")
"""
    monkeypatch.setattr(background, "BOOT", marks + background.BOOT)
    assert ask(service, jobs(1)[0]).built
    assert not service.unavailable and sum(background.lost.values()) == deaths
    (reason,) = autofuse.stats().workers_lost
    assert "does not start" in reason and "ended with 1" in reason and "too early" in reason


def test_a_worker_that_never_starts_is_given_up_with_its_reason(service, monkeypatch, short):
    monkeypatch.setattr(background, "BOOT", "raise SystemExit('no way')")
    answer = ask(service, jobs(1)[0])
    assert answer.refused and "no way" in answer.error and "no way" in service.unavailable
    assert sum(background.lost.values()) == 1 + len(background.PAUSES)
    said = dict(facts())["background compiler"]
    assert said.startswith("does not start") and "no way" in said


def test_processes_that_cannot_be_started_for_a_moment(service, monkeypatch, short):
    real, left = background.subprocess.Popen, [1]

    def popen(*args, **kwargs):
        if left:
            left.pop()
            raise BlockingIOError("no more processes")
        return real(*args, **kwargs)

    monkeypatch.setattr(background.subprocess, "Popen", popen)
    assert ask(service, jobs(1)[0]).built and "no more processes" in str(background.lost)


def test_pauses_end_when_the_service_does(service, monkeypatch):
    monkeypatch.setattr(background, "PAUSES", (60.0, 60.0))
    monkeypatch.setattr(background, "BOOT", "raise SystemExit(3)")
    (source,) = jobs(1)
    service.submit(Job(source.to_json(), "cpu", "0" * 64, lambda answer: None))
    while not background.lost:
        time.sleep(0.01)
    begun = time.monotonic()
    service.close()
    assert time.monotonic() - begun < 5 and not any(t.is_alive() for t in service.threads)


def test_after_a_rest_a_worker_is_tried_again(service, monkeypatch):
    sources = jobs(FAILURES + 2)
    with monkeypatch.context() as patch:
        patch.setattr(background, "BOOT", lying("send(answers, {'ready': True})\nsys.exit(5)\n"))
        for source in sources[:FAILURES]:
            assert "ended with 5" in ask(service, source).error
    answer = ask(service, sources[-2])
    assert "keep dying" in answer.error and "ended with 5" in answer.error and not answer.refused
    assert 0 < service.until - time.monotonic() <= background.REST_SECONDS
    service.until = 0.0
    assert ask(service, sources[-1]).built and service.lost == 0


def test_rests_grow_to_a_limit(service):
    rests = []
    for _ in range(FAILURES + 12):
        service._count("test")
        rests.append(service.until - time.monotonic())
    assert rests[FAILURES - 2] < 0 < rests[FAILURES - 1] <= background.REST_SECONDS
    assert rests[FAILURES] > 1.5 * rests[FAILURES - 1]
    assert max(rests) <= background.MOST_REST_SECONDS


def test_the_report_says_that_workers_start():
    assert dict(facts())["background compiler"] == "starts"


def test_json_of_any_depth_is_no_answer():
    text = b"[" * 100_000
    data = worker._HEAD.pack(worker._MARK, len(text), 0, worker._digest(text, b"")) + text
    with pytest.raises((ValueError, RecursionError)):
        worker.receive(io.BytesIO(data))
