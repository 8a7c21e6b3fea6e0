"""Keys: who is let in, and that nobody sees anything of another tenant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kda_jax.server
from kda_jax.server import Keys, Tenant, read_keys
from server_engine import EchoEngine
from server_site import Site, running, soon

ALICE, BOB, OPERATOR = (f"sk-{name}-0123456789" for name in ("alice", "bob", "operator"))
FILE = f"""
[alice]
key = "{ALICE}"
salt = "salt-of-alice-0123"

[bob]
key = "{BOB}"
salt = "salt-of-bob-012345"

[ops]
key = "{OPERATOR}"
salt = "salt-of-ops-012345"
operator = true
"""
PATHS = ["/v1/models", "/v1/models/tiny", "/live", "/explain?prompt=a", "/metrics"]


def keys(tmp_path: Path, text: str) -> Keys:
    (tmp_path / "keys.toml").write_text(text)
    return read_keys(tmp_path / "keys.toml")


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def site(engine: EchoEngine, tmp_path: Path) -> Iterator[Site]:
    with running(engine, keys=keys(tmp_path, FILE)) as site:
        yield site


def test_a_keys_file(tmp_path: Path) -> None:
    found = keys(tmp_path, FILE)
    assert not found.open and Keys().open
    assert found.tenant(f"Bearer {BOB}") == Tenant("bob", "salt-of-bob-012345", False)
    assert found.tenant(f"bearer  {OPERATOR}") == Tenant("ops", "salt-of-ops-012345", True)
    for wrong in ("", "Bearer", f"Basic {BOB}", f"Bearer {BOB}x", BOB, "Bearer \udce9"):
        assert found.tenant(wrong) is None


def test_the_readmes_keys_file_is_one(tmp_path: Path) -> None:
    readme = Path(kda_jax.server.__file__).with_name("README.md").read_text(encoding="utf-8")
    block = re.search(r"```toml\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    tenants = [keys(tmp_path, block[1]).named(name) for name in ("alice", "ops")]
    assert [tenant and tenant.operator for tenant in tenants] == [False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no tenant"),
        ("[a", "is no TOML"),
        ("a = 1", "must be a table"),
        ('[a]\nkey = "short"\nsalt = "salt-of-alice-0123"', "a key of at least 16 ASCII characters"),
        (f'[a]\nkey = "{ALICE}"', "needs a salt"),
        (FILE.replace("salt-of-bob-012345", ""), "[bob] needs a salt"),
        (FILE.replace("operator = true", 'operator = "yes"'), "operator is true or false"),
        (FILE.replace("operator", "admin"), "[ops] has 'admin'"),
        (FILE.replace(BOB, ALICE), "[bob] has the key of [alice]"),
    ],
)
def test_a_keys_file_that_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"keys\.toml") as error:
        keys(tmp_path, text)
    assert words in str(error.value)
    assert not any(secret in str(error.value) for secret in (ALICE, BOB, "salt-of-alice-0123"))


def test_without_a_key_nobody_is_let_in(site: Site, engine: EchoEngine) -> None:
    for path in PATHS:
        answer = site.ask("GET", path)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer", path
        assert answer.json["error"]["code"] == "invalid_api_key"
    for path in ("/v1/completions", "/v1/chat/completions", "/explain"):
        assert site.ask("POST", path, b"{", key="sk-nobody-0123456789").status == 401
    with pytest.raises(openai.AuthenticationError, match="no key that this server takes"):
        site.client("sk-nobody-0123456789").completions.create(model="tiny", prompt="a")
    assert not engine.submitted
    assert site.ask("GET", "/health").status == site.ask("GET", "/openapi.json").status == 200
    assert site.ask("GET", "/").status == 200  # it holds nothing


def test_a_request_carries_its_tenants_salt(site: Site, engine: EchoEngine) -> None:
    for key in (ALICE, BOB):
        answer = site.client(key).completions.create(model="tiny", prompt="same", max_tokens=1)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert [given["tenant"] for given in engine.submitted] == ["salt-of-alice-0123", "salt-of-bob-012345"]


def test_a_tenant_sees_his_own_alone(site: Site, engine: EchoEngine) -> None:
    site.client(ALICE).completions.create(model="tiny", prompt="done", max_tokens=1)
    engine.hold.clear()
    stream = site.client(ALICE).completions.create(model="tiny", prompt="secret", max_tokens=9, stream=True)
    next(stream)
    seen = {key: site.ask("GET", "/live", key=key) for key in (ALICE, BOB, OPERATOR)}
    engine.hold.set()
    stream.close()
    assert {key: len(found.json["requests"]) for key, found in seen.items()} == {
        ALICE: 1,
        BOB: 0,
        OPERATOR: 1,
    }
    assert {key: len(found.json["tree"]) for key, found in seen.items()} == {ALICE: 2, BOB: 0, OPERATOR: 2}
    assert {key: len(found.json["rates"]) for key, found in seen.items()} == {ALICE: 1, BOB: 0, OPERATOR: 1}
    assert {key: "engine" in found.json for key, found in seen.items()} == {
        ALICE: False,
        BOB: False,
        OPERATOR: True,
    }
    assert seen[OPERATOR].json["requests"][0]["tenant"] == "alice"
    for found in seen.values():
        assert b"salt" not in found.body and b"secret" not in found.body


def test_explain_is_about_ones_own(site: Site) -> None:
    site.client(ALICE).completions.create(model="tiny", prompt="secret", max_tokens=1)
    assert site.ask("GET", "/explain?prompt=secret", key=ALICE).json["boundary"] == 5
    assert site.ask("GET", "/explain?prompt=secret", key=BOB).json["boundary"] == 0
    assert site.ask("GET", "/explain?prompt=secret", key=OPERATOR).json["boundary"] == 0
    assert site.ask("GET", "/explain?prompt=secret&tenant=alice", key=OPERATOR).json["boundary"] == 5
    assert site.ask("GET", "/explain?prompt=secret&tenant=alice", key=ALICE).json["boundary"] == 5
    for name in ("alice", "nobody"):  # whether there is such a tenant is not told either
        refused = site.ask("GET", f"/explain?prompt=secret&tenant={name}", key=BOB)
        assert refused.status == 403 and refused.json["error"]["code"] == "not_an_operator"
    unknown = site.ask("POST", "/explain", {"prompt": "secret", "tenant": "nobody"}, key=OPERATOR)
    assert unknown.status == 400 and unknown.json["error"]["param"] == "tenant"


def test_explain_takes_the_body_of_a_request(site: Site) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    assert site.ask("POST", "/v1/chat/completions", body | {"max_tokens": 1}, key=BOB).status == 200
    found = site.ask("POST", "/explain", body, key=BOB).json
    assert (found["tokens"], found["boundary"], found["state"]) == (4, 3, "device")
    assert found["words"][0] == "3 of 4 tokens would be restored (3 from device; state from device)"
    assert "last token" in found["words"][1]


def test_metrics_are_an_operators(site: Site) -> None:
    assert site.ask("GET", "/metrics", key=ALICE).status == 403
    site.client(ALICE).completions.create(model="tiny", prompt="ab", max_tokens=5, n=2)
    answer = site.ask("GET", "/metrics", key=OPERATOR)
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"alice" not in answer.body and b"salt" not in answer.body
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert samples["kda_time_to_first_token_seconds_count",] == 2
    assert samples["kda_time_per_token_seconds_count",] == 8
    assert samples["kda_prompt_tokens_total", ("source", "computed")] == 50
    assert samples["kda_prompt_tokens_total", ("source", "disk")] == 9
    assert samples["kda_generated_tokens_total",] == 11
    assert samples["kda_drafted_tokens_total",] == 18 and samples["kda_accepted_tokens_total",] == 19
    assert samples["kda_requests", ("state", "loading")] == 2 and samples["kda_slots",] == 8
    assert samples["kda_pages", ("state", "free")] == 60
    assert samples["kda_tier_budget_bytes", ("tier", "device")] == 7000
    assert samples["kda_checkpoints_evicted_total",] == 12
    assert samples["kda_checkpoints_unwritten_total", ("tier", "disk")] == 15
    failed, retries = (
        [("operation", "get"), ("outcome", "failed")],
        [("operation", ""), ("outcome", "retries")],
    )
    assert samples["kda_store_objects_total", *failed, ("tier", "remote")] == 16
    assert samples["kda_store_objects_total", *retries, ("tier", "remote")] == 17
    assert samples["kda_store_state", ("state", "open"), ("tier", "remote"), ("what", "breaker")] == 1
    assert samples["kda_step_seconds_sum",] == 1.0


def test_an_open_server_shows_everything_to_everybody(engine: EchoEngine) -> None:
    with running(engine) as site:
        site.client().completions.create(model="tiny", prompt="ab", max_tokens=1)
        seen = site.ask("GET", "/live").json
        assert seen["open"] and seen["operator"] and "engine" in seen and len(seen["tree"]) == 1
        assert seen["engine"]["step"] == {
            "count": 4,
            "total": 1.0,
            "recent_p50": pytest.approx(0.25),
            "recent_p99": pytest.approx(0.397),
        }
        assert engine.submitted[0]["tenant"] == ""
        assert soon(lambda: site.ask("GET", "/live").json["requests"] == [])
