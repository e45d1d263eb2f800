"""`stretto doctor`: complete, true, and silent about secrets."""

from __future__ import annotations

import json

import pytest

from stretto.launching import doctor


@pytest.fixture(scope="module")
def findings() -> doctor.Findings:
    return doctor.examine({"STRETTO_SECRET": "5" * 64, "STRETTO_RANK": "1", "STRETTO_INTERFACE": "lo", "HOME": "/x"})


def test_every_section_has_been_examined_without_a_failure(findings: doctor.Findings) -> None:
    wanted = ["versions", "machine", "devices", "network", "reachable", "limits", "lab", "environment"]

    assert list(findings) == wanted
    assert not [section for section, values in findings.items() if "check failed" in values]
    assert findings["versions"]["libzmq"].endswith("with CURVE")
    assert findings["reachable"]["127.0.0.1"] == "listens and answers"
    assert findings["lab"]["can run"].startswith(("yes", "no"))


def test_job_variables_are_shown_and_secrets_are_not(findings: doctor.Findings) -> None:
    shown = findings["environment"]

    assert shown["STRETTO_RANK"] == "1" and "HOME" not in shown
    assert shown["STRETTO_SECRET"] == "(set, 64 characters, not shown)"
    assert "5" * 64 not in doctor.as_text(findings) + doctor.as_json(findings)


def test_a_secret_file_is_named_and_look_alikes_are_hidden() -> None:
    shown = doctor.environment({"STRETTO_SECRET_FILE": "job.secret", "TORCH_API_KEY": "abc", "NCCL_TOKEN": "abc"})

    assert shown["STRETTO_SECRET_FILE"] == "job.secret"
    assert "abc" not in str(shown)


def test_the_published_address_follows_the_users_choice() -> None:
    assert doctor.network({"STRETTO_INTERFACE": "lo"})["published to other hosts"].startswith("127.0.0.1")
    assert "no such interface" in doctor.network({"STRETTO_INTERFACE": "none7"})["published to other hosts"]


def test_a_check_that_fails_is_a_finding_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Section:
        raise OSError("no /proc here")

    monkeypatch.setattr(doctor, "limits", broken)
    assert doctor.examine({})["limits"] == {"check failed": "OSError: no /proc here"}


def test_both_forms_say_the_same(findings: doctor.Findings) -> None:
    assert json.loads(doctor.as_json(findings)) == findings
    text = doctor.as_text(findings)
    assert all(name in text and value in text for values in findings.values() for name, value in values.items())
