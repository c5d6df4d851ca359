"""`kvproto import`, and `check` of captures, as an operator runs them."""

import io
import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import kvproto
from kvproto.cli.main import main
from kvproto.planning.cache import Cache
from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Parallel, lay_out
from kvproto.wire import from_json, to_json
from tests.commands import Ran

CAPTURES = Path(__file__).with_name("recordings")
SGLANG = str(CAPTURES / "sglang-live.jsonl")
VLLM = str(CAPTURES / "vllm-live.jsonl")
SAID = ["--say", "page=16", "--say", "dtype=bfloat16", "--say", "kv_heads=8"]


def test_import_prints_fields_words_and_what_is_unsaid(ran: Ran) -> None:
    said = ran("import", SGLANG)
    assert "sglang 0.5.23: 4 messages" in said
    assert "  9 dst_kv_item_len          4096" in said
    assert "tp               4  (messages[0].dst_attn_tp_size)" in said
    assert "  page             tokens of a page  (--say page=...: a number)" in said
    assert "The Description follows" not in said


def test_import_writes_a_description(tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: Ran) -> None:
    out = tmp_path / "d.json"
    assert main(["import", SGLANG, *SAID, "--fact", "weights.target=r7", "--out", str(out)]) == 0
    made = from_json(Geometry, json.loads(out.read_text()))
    assert (len(made.ranks), made.facts[0].value) == (4, "r7")
    capsys.readouterr()
    told = json.loads(ran("import", SGLANG, *SAID, "--json"))
    assert (told["engine"], told["releases"], told["stated"]["head_dim"]) == ("sglang", ["0.5.23"], 64)
    assert [u["word"] for u in told["unsaid"]] == ["pp", "cp"]
    assert len(told["description"]["ranks"]) == 4


def test_import_from_a_pipe_and_with_a_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: Ran) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"num_hidden_layers": 3, "num_key_value_heads": 8, "head_dim": 64, "num_attention_heads": 8})
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(SGLANG).read_bytes())))
    assert "The Description follows" in ran("import", "-", "--config", config, *SAID[:4])


def test_a_field_of_a_config_that_nobody_knows_is_left_out_as_the_error_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: Ran
) -> None:
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 8, "head_dim": 64, "num_attention_heads": 8}
    config.write_text(json.dumps(sizes | {"kv_turned_over": 4}))
    asked = ["import", SGLANG, *SAID[:4], "--config", str(config)]
    assert main(asked) == 1
    assert "config.kv_turned_over" in (said := capsys.readouterr().err)
    assert "--ignore" in said
    assert "The Description follows" in ran(*asked, "--ignore", "kv_turned_over")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            [SGLANG, "--out", "x"],
            "MISSING_FIELD at page: wanted tokens of a page, found unsaid (--say page=...: a number)",
        ),
        ([SGLANG, "--say", "page"], "OUT_OF_RANGE at say: wanted NAME=VALUE, each name once, found page"),
        ([SGLANG, *SAID[2:], "--say", "page=32", "--say", "head_dim=64"], "BAD_GEOMETRY at ranks[0].entries[0].bytes"),
        ([SGLANG, "--release", "0.5.23"], "MISSING_FIELD at engine"),
        ([SGLANG, "--engine", "sglang", "--release", "9.9"], "UNSUPPORTED_VERSION at release"),
        ([SGLANG, "--engine", "vllm"], "UNKNOWN_MESSAGE at messages[0]"),
        (["/no/such/file"], "No such file"),
        ([str(Path(__file__))], "MISSING_FIELD at messages"),
    ],
)
def test_import_refuses_in_one_line(args: list[str], said: str, ran: Ran) -> None:
    error = ran("import", *args, status=1)
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_check_of_two_captures(tmp_path: Path, ran: Ran) -> None:
    said = ran("check", SGLANG, SGLANG, status=4)
    assert "do not differ in what both state" in said
    assert "unsaid by prefill: page, dtype, kv_heads, head_dim, layers" in said
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 3, "num_key_value_heads": 8, "head_dim": 64}))
    assert "unsaid by prefill: page, dtype (--say" in ran("check", SGLANG, SGLANG, "--config", config, status=4)
    assert "by kvproto, compatible: plan " in ran("check", SGLANG, SGLANG, *SAID)
    told = json.loads(ran("check", SGLANG, VLLM, "--json", status=3))
    assert (told["compatible"], told["differences"][0]["path"]) == (False, "engine")


def test_check_says_words_of_one_side(ran: Ran) -> None:
    said = [
        "--say",
        "dtype=bfloat16",
        "--say",
        "source.page=16",
        "--say",
        "source.kv_heads=8",
        "--say",
        "sink.kv_heads=4",
    ]
    out = ran("check", SGLANG, VLLM, *said, status=3)
    assert "prefill sglang 0.5.23; decode vllm 0.32.0" in out
    assert "by kvproto, refused: " in out


def test_sides_of_said_words(tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: Ran) -> None:
    out = tmp_path / "d.json"
    assert main(["import", SGLANG, *SAID, "--out", str(out)]) == 0
    of_prefill = [word if word == "--say" else f"prefill.{word}" for word in SAID]
    assert main(["check", SGLANG, str(out), *of_prefill]) == 0
    capsys.readouterr()
    for sides, word, said in (
        ([SGLANG, str(out)], "decode.page=16", f"wanted words of captures: {out} is a Description, found page"),
        ([SGLANG, SGLANG], "left.page=16", "wanted NAME, prefill.NAME or decode.NAME, found left.page"),
        ([SGLANG, SGLANG], ".page=16", "wanted NAME, prefill.NAME or decode.NAME, found .page"),
        ([SGLANG, SGLANG], "source.page=16", "wanted each name of a side once, found source.page"),
        ([SGLANG, SGLANG], "page", "wanted NAME=VALUE, each name once, found prefill.page=32 page"),
    ):
        assert said in ran("check", *sides, "--say", "prefill.page=32", "--say", word, status=1)


def test_check_of_a_capture_and_a_description(tmp_path: Path, ran: Ran) -> None:
    out = tmp_path / "d.json"
    assert main(["import", SGLANG, *SAID, "--out", str(out)]) == 0
    assert main(["check", SGLANG, str(out), *SAID]) == 0
    assert "unsaid by decode: page, dtype, kv_heads" in ran("check", out, SGLANG, status=4)
    assert main(["check", str(out), str(out)]) == 0


def test_check_takes_plan_features_and_refuses_options_that_say_nothing(tmp_path: Path, ran: Ran) -> None:
    out, replicated = tmp_path / "d.json", [*SAID[:4], "--say", "kv_heads=2"]
    heads = Cache.gqa("target", 3, kv_heads=2, head_dim=128, page=16)
    out.write_text(json.dumps(to_json(lay_out([heads], Parallel(tp=2)))))
    plans = set()
    for options in ([], ["--spread-one"]):
        plans.add(json.loads(ran("check", SGLANG, out, *replicated, *options, "--json"))["plan"])
    assert len(plans) == 2
    assert "error: --say is of captures, and both files are Descriptions" in ran(
        "check", out, out, "--say", "page=16", status=1
    )


def test_check_of_a_cut_capture_names_what_is_wrong(tmp_path: Path, ran: Ran) -> None:
    cut = tmp_path / "cut"
    for data, said in (
        (b"\xff" + bytes(8) + b"\x7f", "TRUNCATED at capture"),
        (b'{"frames": ["00"', "BAD_TYPE at messages[0]"),
    ):
        cut.write_bytes(data)
        assert said.replace("at ", f"at {cut}: ") in ran("check", SGLANG, cut, status=1)


def test_without_the_package_the_command_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    error = ran("import", SGLANG, "--json", status=1)
    assert error == f"error: pip install kvproto-engines=={kvproto.__version__}, of which 'import' is a command\n"


def test_a_package_that_cannot_be_loaded_leaves_the_other_commands(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    broken = EntryPoint("weather", "no_such_package:add", "kvproto.commands")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: (broken,))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    assert "'weather' of the entry points kvproto.commands: No module named" in ran("weather", status=1)
