"""The check of private members, and what importing needs."""

import subprocess
import sys
from unittest import mock

import pytest

from multiloss import _upstream


def test_the_installed_versions_pass() -> None:
    """Every member is there."""
    _upstream.check()


def test_a_missing_member_is_named() -> None:
    """With the reason and the versions to install."""
    with (
        mock.patch.dict(_upstream._MEMBERS, {"deepspeed.runtime.zero.stage3": {"NoSuchClass": "for the test"}}),
        pytest.raises(ImportError, match=r"stage3.NoSuchClass` \(for the test\).*deepspeed>=0.19.8,<0.20"),
    ):
        _upstream.check()
    attributes = {"deepspeed.runtime.engine.DeepSpeedEngine.__init__": {"_no_such_attribute": "for the test"}}
    with (
        mock.patch.dict(_upstream._ATTRIBUTES, attributes),
        pytest.raises(ImportError, match=r"DeepSpeedEngine\(\)._no_such_attribute"),
    ):
        _upstream.check()


def test_importing_compiles_nothing_and_needs_no_network() -> None:
    """In a process without a compiler on its path, without a home and without sockets."""
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "import multiloss\n"
        "print(multiloss.__all__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/nonexistent", "HOME": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "DeepSpeedMultiLossStrategy" in result.stdout
