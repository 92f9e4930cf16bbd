"""Which line is the user's: told by where files are, not by what folders are called."""

import os
import sys
from pathlib import Path

import pytest
import torch

import autofuse
from autofuse.lines import OURS, PACKAGE, TORCH, is_inside, user_position
from autofuse.run import generated

CLONE = Path(autofuse.__file__).parent.parent


def calling(path, function):
    """A function of the file `path` that calls `function`."""
    space = {"function": function}
    exec(compile("def call():\n    return function()\n", str(path), "exec"), space)
    return space["call"]


@pytest.mark.parametrize(
    "path",
    [
        CLONE / "train.py",  # a clone is called as its package is
        CLONE / "tests" / "test_anything.py",
        "/home/somebody/autofuse/train.py",
        "/home/somebody/autofuse/torch/train.py",
        PACKAGE.rstrip(os.sep) + ".py",
        PACKAGE.rstrip(os.sep) + "_models/cell.py",
        TORCH.rstrip(os.sep) + "vision/models.py",
    ],
)
def test_programs_are_told_by_where_they_are(path):
    ours = calling(f"{PACKAGE}chain.py", user_position)
    assert calling(path, ours)() == (str(path), 2)


@pytest.mark.parametrize("path", [f"{PACKAGE}chain.py", torch.__file__, "<autofuse runner>"])
def test_no_line_of_autofuse_and_torch_is_the_users(path):
    assert calling(path, lambda: is_inside(sys._getframe(1)))()


def test_ours_are_the_files_of_the_package_and_code_made_while_running():
    assert autofuse.record.record.record.__code__.co_filename.startswith(OURS)
    assert generated.compiled("pass").co_filename.startswith(OURS)
    assert not __file__.startswith(OURS)
