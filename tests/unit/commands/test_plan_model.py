"""``ds-muon plan`` for models that are not at hand: of a Hugging Face config, and of a function of the user's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_muon import cli
from ds_muon.plan_cost import default_settings, llama, step_cost
from ds_muon.plan_model import Planned, made_by, named, rows, table

LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 64},
    **{"intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2},
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
}


def planned(tmp_path: Path, config: object, *, file: bool = False) -> Planned:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[integrations]'")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return named(str(tmp_path / "config.json" if file else tmp_path))


def test_a_hugging_face_config_has_the_plan_of_its_matrices(tmp_path: Path) -> None:
    model = planned(tmp_path, LLAMA)
    settings = default_settings()
    for ranks in (1, 3, 8):
        found, known = step_cost(model.shapes, ranks, settings, pieces=model.pieces), llama(2, 64, 16, 176)
        assert replace(found, travellers=()) == replace(step_cost(known, ranks, settings), travellers=())
    assert planned(tmp_path, {**LLAMA, "architectures": None}, file=True).shapes == model.shapes


def test_the_routing_has_a_row_for_each_kind_of_tensor(tmp_path: Path) -> None:
    routing = planned(tmp_path, LLAMA).routing
    assert routing is not None
    found = rows(routing)
    by_name = {row.name: row for row in found}
    assert by_name["model.layers.*.mlp.down_proj.weight"].tensors == 2
    assert by_name["model.layers.*.mlp.down_proj.weight"].shape == (64, 176)
    assert (by_name["lm_head.weight"].half, by_name["lm_head.weight"].reason) == ("adamw", "output head")
    assert sum(row.tensors for row in found) == len(routing.routes)
    assert sum(row.share for row in found) == pytest.approx(1)
    assert table(found).splitlines()[1].split()[:2] == ["1", "model.embed_tokens.weight"]


def test_every_expert_of_a_stack_is_a_matrix(tmp_path: Path) -> None:
    model = planned(tmp_path, MIXTRAL)
    cost = step_cost(model.shapes, 4, default_settings(), pieces=model.pieces)
    # Of each layer q, k, v, o, the router, and of each expert gate with up, and down.
    assert cost.matrices == 2 * (5 + 4 * 2)
    assert cost.flops == sum(cost.loads)


def test_the_command_shows_routing_and_plan_and_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, LLAMA)
    out = tmp_path / "plan.json"
    assert cli.main(["plan", str(tmp_path), "gpt-124m", "--world-size", "2", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Muon: 14 matrices" in said and "model.layers.*.self_attn.q_proj.weight" in said and "gpt-124m: 72" in said
    written = json.loads(out.read_text())
    assert set(written) == {str(tmp_path), "gpt-124m", "routing"} and set(written["routing"]) == {str(tmp_path)}
    assert written[str(tmp_path)][0]["matrices"] == 14


def test_a_function_of_the_users_makes_the_model_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planned_by_a_test.py").write_text(
        "from torch import nn\n"
        "def make(rank, world_size):\n"
        "    model = nn.Sequential(nn.Linear(2**20, 2**20, bias=False), nn.LayerNorm(2**20))\n"
        "    assert all(p.is_meta for p in model.parameters())\n"
        "    return model, []\n"
        "def fails(rank, world_size):\n"
        "    raise KeyError('a secret')\n"
        "def small(rank, world_size):\n"
        "    return nn.LayerNorm(4), []\n"
        "def alone(rank, world_size):\n"
        "    return nn.Linear(4, 4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert made_by("planned_by_a_test:make").shapes == [("0.weight", (2**20, 2**20))]
    for name, words in {
        "fails": "cannot be made on the meta device: 'a secret'",
        "small": "has no trainable matrix for Muon",
        "alone": "return a pair (model, batches)",
        "nothing": "has no function nothing",
    }.items():
        assert cli.main(["plan", "--model", f"planned_by_a_test:{name}"]) == 2
        err = capsys.readouterr().err
        assert words in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "neither one of gpt-124m"),
        ("{", "cannot be made on the meta device"),
        ('{"model_type": "no-such-model"}', "cannot be made on the meta device"),
        ('{"model_type": "llama", "architectures": ["NoSuchModel"]}', "has no class NoSuchModel"),
        ('{"model_type": "llama", "hidden_size": "large"}', "Field 'hidden_size' expected int, got str"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}}', "cannot be made on the meta device"),
    ],
)
def test_what_is_no_model_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[integrations]'")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert cli.main(["plan", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err and len(err.splitlines()) == 1
    assert cli.main(["plan"]) == 2 and "give a MODEL" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "gpt-124m", "--world-size", "1000000000"])
    assert "1000000000: it must be at most 100000" in capsys.readouterr().err
