"""`kvproto describe`, `check`, `plan` as a router or CI job calls them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvproto import Cache, DType, lay_out
from kvproto.cli.main import main
from kvproto.planning.geometry import validate
from kvproto.planning.layout import Parallel
from kvproto.planning.plan import plan
from kvproto.wire import to_json
from kvproto_catalog.models import PRESETS, describe
from tests.commands import Ran
from tools.specgen.registry import ROOT


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    made = {}
    for name, preset, tp in (
        ("p", "deepseek-v3-eagle3", 8),
        ("d", "deepseek-v3-eagle3", 4),
        ("l", "llama-3-70b", 4),
        ("n", "deepseek-v3", 8),
    ):
        path = tmp_path / f"{name}.json"
        configs = PRESETS[preset]
        path.write_text(
            json.dumps(to_json(describe(configs[0], configs[1:], Parallel(tp=tp), facts={"weights": preset[:8]})))
        )
        made[name] = str(path)
    return made


PLAIN = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
}
LATENT = {
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "dtype": "bfloat16",
}


def written(path: Path, config: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", ["bogus", "num_key_value_heads", "head_dim", "dtype"])
def test_a_field_that_is_read_or_is_not_there_is_not_ignored(name: str, tmp_path: Path, ran: Ran) -> None:
    """Without its KV heads a model would have as many as query heads."""
    config = written(tmp_path / "config.json", PLAIN)
    assert "ignore: wanted a field" in ran("describe", config, "--ignore", name, "--kv-dtype", "BF16", status=1)


def test_a_type_that_is_not_known_is_ignored_by_name(tmp_path: Path, ran: Ran) -> None:
    config = written(tmp_path / "config.json", PLAIN | {"model_type": "bogus"})
    assert "config.model_type" in ran("describe", config, status=1)
    assert ran("describe", config, "--ignore", "model_type") == ran("describe", written(tmp_path / "plain", PLAIN))


def test_a_file_without_a_dtype_says_which_it_is(tmp_path: Path, ran: Ran) -> None:
    config = written(tmp_path / "config.json", {name: value for name, value in PLAIN.items() if name != "dtype"})
    assert "config.torch_dtype: wanted a dtype" in ran("describe", config, status=1)
    assert ran("describe", config, "--kv-dtype", "BF16") == ran("describe", written(tmp_path / "plain", PLAIN))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-dtype", "F16", "--convert", "e4m3_tensor"], "convert: wanted a cache in one of the two forms"),
        (["--kv-dtype", "MXFP4", "--convert", "e4m3_tensor"], "convert: wanted a cache in one of the two forms"),
        (["--convert", "e4m3_block=0.03"], "convert: wanted e4m3_block without a scale"),
        (["--convert", "e4m3_tensor=0.03"], "convert: wanted no scale, as no cache of FP8 lacks one"),
        (["--convert", "e4m3_tensor=nan"], "convert: wanted no scale"),
        (["--kv-dtype", "F8E4M3", "--convert", "e4m3_tensor=nan"], "scales: wanted numbers above 0"),
        (["--kv-dtype", "F8E4M3", "--convert", "e4m3_tensor=abc"], "scales: wanted numbers above 0"),
        (["--kv-dtype", "F8E4M3", "--convert", "e4m3_tensor"], "x_scales"),
        (["--convert", "abc"], "convert: wanted e4m3_tensor, e4m3_block"),
        (["--convert", "e4m3_block", "--convert", "e4m3_block"], "each once"),
    ],
)
def test_conversions_that_cannot_be_stated(options: list[str], said: str, tmp_path: Path, ran: Ran) -> None:
    assert said in ran("describe", written(tmp_path / "config.json", PLAIN), *options, status=1)


def test_a_cache_states_both_conversions(tmp_path: Path, ran: Ran) -> None:
    config = written(tmp_path / "config.json", PLAIN)
    both = json.loads(ran("describe", config, "--convert", "e4m3_tensor", "--convert", "e4m3_block"))
    assert {tuple(part["x_conversions"]) for part in both["groups"][0]["parts"]} == {("e4m3_tensor", "e4m3_block")}


@pytest.mark.parametrize("names", [["e4m3_tensor"], ["e4m3_block"], ["e4m3_tensor", "e4m3_block"]])
def test_an_index_with_scales_does_not_keep_its_latent_from_converting(
    names: list[str], tmp_path: Path, ran: Ran
) -> None:
    """DeepSeek V3.2: its index is FP8 on both sides, with a scale of its own."""
    config = written(tmp_path / "config.json", LATENT)
    prefill = tmp_path / "prefill"
    prefill.write_text(ran("describe", config, *(word for name in names for word in ("--convert", name))))
    parts = {part["name"]: part for group in json.loads(prefill.read_text())["groups"] for part in group["parts"]}
    assert parts["latent"]["x_conversions"] == names
    assert "x_scales" not in parts["index"]
    if names == ["e4m3_tensor"]:
        decode = tmp_path / "decode"
        decode.write_text(ran("describe", config, "--kv-dtype", "F8E4M3", "--convert", "e4m3_tensor=0.03"))
        assert "compatible" in ran("check", prefill, decode, "--convert")


def test_a_config_is_no_description(tmp_path: Path, ran: Ran) -> None:
    config = written(tmp_path / "config.json", PLAIN)
    assert "a Description, which `kvproto describe` writes" in ran("check", config, config, status=1)


def test_each_group_has_a_letter_of_its_own(tmp_path: Path, ran: Ran) -> None:
    v4 = {
        "model_type": "deepseek_v4", "num_hidden_layers": 4, "head_dim": 512, "num_key_value_heads": 1, "index_head_dim": 128,
        "num_attention_heads": 64, "sliding_window": 128, "compress_ratios": [0, 4, 128, 4], "dtype": "bfloat16",
    }  # fmt: skip
    made = tmp_path / "v4"
    made.write_text(ran("describe", written(tmp_path / "config.json", v4)))
    letters = re.findall(r"(\w) = ", ran("plan", made, made, "--tokens", "1000").splitlines()[0])
    assert len({*letters}) == len(letters) == 7


def test_describe_writes_what_check_reads(tmp_path: Path, ran: Ran) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "num_hidden_layers": 4,
                "hidden_size": 512,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "torch_dtype": "float16",
            }
        )
    )
    for name, options in (("a", ["--tp", "2", "--pp", "3"]), ("b", ["--tp", "4", "--dcp", "2", "--page", "16"])):
        (tmp_path / name).write_text(ran("describe", config, *options, "--fact", "weights=r7"))
    assert "compatible" in ran("check", tmp_path / "a", tmp_path / "b")
    assert "D3 " in ran("plan", tmp_path / "a", tmp_path / "b", "--tokens", "100", "--first-token", "7")


def test_a_field_that_is_not_known_is_refused_until_it_is_ignored_by_name(tmp_path: Path, ran: Ran) -> None:
    """In the target and in the draft, and also within the language model of a multimodal one."""
    sizes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "dtype": "float16",
    }
    plain, new, inner = tmp_path / "plain", tmp_path / "new", tmp_path / "inner"
    plain.write_text(json.dumps(sizes))
    new.write_text(json.dumps(sizes | {"engram_cache_size": 3, "swa_heads": 2}))
    inner.write_text(json.dumps({"text_config": sizes | {"engram_cache_size": 3}}))
    both = ["--ignore", "swa_heads", "--ignore", "engram_cache_size"]
    for options in ([], ["--engine", "sglang"]):
        for configs in ([new], [inner], [plain, "--draft", new]):
            assert "config.engram_cache_size" in ran("describe", *configs, *options, status=1)
        assert "config.engram_cache_size" in ran("describe", new, *options, *both[:2], status=1)
        wanted = ran("describe", plain, *options)
        assert ran("describe", new, *options, *both) == ran("describe", inner, *options, *both[2:]) == wanted
        assert ran("describe", plain, "--draft", new, *options, *both) == ran(
            "describe", plain, "--draft", plain, *options
        )


def test_describe_states_what_is_dealt_and_from_where(ran: Ran) -> None:
    options = ["--preset", "deepseek-v3-eagle3", "--tp", "2", "--dcp", "2", "--origin", "5"]
    groups = json.loads(ran("describe", *options, "--sharded", "draft", "--replicated", "target"))["groups"]
    assert {g["name"]: (g["cp_size"], g["origin"]) for g in groups} == {"target": ("1", "0"), "draft": ("2", "5")}
    assert "sharded: wanted one of target, draft" in ran("describe", *options, "--sharded", "eagle", status=1)


def test_values_without_their_scales_are_refused(tmp_path: Path, ran: Ran) -> None:
    """KVP-PLAN-LEFT: of one of vLLM's kinds of FP8 to another, whose values have the same dtype and lanes."""
    files = []
    for dtype in ("fp8_per_token_head", "fp8"):
        files.append(str(tmp_path / dtype))
        (tmp_path / dtype).write_text(
            ran("describe", "--preset", "llama-3-70b", "--engine", "vllm", "--kv-dtype", dtype)
        )
    assert "has k_scale, v_scale beside k in layer 0, decode has k without k_scale, v_scale" in ran(
        "check", *files, status=3
    )


def test_refused_pairs_say_why(files: dict[str, str], ran: Ran) -> None:
    assert "refused: IDENTITY_MISMATCH at facts[weights]: prefill has deepseek, decode has llama-3-" in ran(
        "check", files["p"], files["l"], status=3
    )
    said = json.loads(ran("check", files["n"], files["d"], "--json", status=3))
    assert (said["compatible"], said["code"], said["path"]) == (False, "PART_MISSING", "groups[draft].parts[k]")
    assert "draft 1 starts cold" in ran("check", files["n"], files["d"], "--cold-draft")


def test_check_names_facts_that_neither_side_states(files: dict[str, str], tmp_path: Path, ran: Ran) -> None:
    assert ran("check", files["p"], files["d"]).splitlines()[-1] == (
        "not compared, as neither side states them: weights.target, weights.draft, tokenizer, rope.target, rope.draft"
    )
    stated = [f"--fact={name}=1" for name in ("weights.target", "tokenizer", "rope.target")]
    out = tmp_path / "fp8.json"
    out.write_text(ran("describe", "--preset", "llama-3-70b", "--kv-dtype", "F8E4M3", *stated))
    assert json.loads(ran("check", out, out, "--json"))["unstated"] == ["kv_scales.target"]
    out.write_text(ran("describe", "--preset", "llama-3-70b", *stated))
    assert "not compared" not in ran("check", out, out)


def test_windows_that_differ_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str], ran: Ran) -> None:
    config = json.loads((ROOT / "examples/configs/gpt-oss-20b.json").read_text())
    files = []
    for window, options in ((512, []), (1024, []), (1024, ["--fact", "window.target=1024"])):
        config["sliding_window"] = window
        (tmp_path / "config.json").write_text(json.dumps(config))
        for engine in ([], ["--engine", "vllm"]):
            assert main(["describe", str(tmp_path / "config.json"), *engine, *options]) == 0
            files.append(tmp_path / f"{len(files)}.json")
            files[-1].write_text(capsys.readouterr().out)
    warned = "warning: facts[window.target]: prefill has 512, decode has 1024"
    for i in (0, 1):
        assert warned in ran("check", files[i], files[i + 2])
        assert "warning" not in ran("check", files[i], files[i])
        assert "IDENTITY_MISMATCH at facts[window.target]" in ran("check", files[i], files[i + 4], status=3)


def test_plan_is_a_picture_and_data(files: dict[str, str], ran: Ran) -> None:
    said = ran("plan", files["p"], files["d"])
    assert "  D1   .   T   D   D   .   T   .   .    4 of 8" in said
    assert "2.3 GB in" in said
    data: dict[str, Any] = json.loads(ran("plan", files["p"], files["d"], "--json"))
    assert data["required"]["1"] == [1, 2, 3, 5]
    assert sum(pair["bytes"] for pair in data["pairs"]) == 8192 * (4 * 61 * 1152 + 2 * 8 * 256)
    assert "  D0   TD  D   .   ." in ran("plan", files["p"], files["d"], "--spread-one")


def test_slices_are_a_table_and_data(files: dict[str, str], ran: Ran) -> None:
    said = ran("plan", files["p"], files["d"], "--slices").splitlines()
    assert said[0].split("  ")[0] == "local rank"
    assert "layers 0-60 by 2; lanes 0" in next(line for line in said if line.startswith("D1") and "P1" in line)
    data = json.loads(ran("plan", files["p"], files["d"], "--slices", "--json"))["slices"]
    mine = [s for s in data if (s["sink"], s["cache"]) == (1, "draft.k")]
    assert [(s["source"], *(s[side]["columns"][0]["lanes"] for side in ("whole", "local", "remote"))) for s in mine] == [
        (2, [[512, 768]], [[0, 256]], [[0, 256]]), (3, [[768, 1024]], [[256, 512]], [[0, 256]]),
    ]  # fmt: skip
    assert mine[0]["text"]["global range"] == "layers 0; lanes 2"


BAD = {
    "not there": ("no.json", "No such file"),
    "not JSON": ("{", "wanted JSON"),
    "not a Description": ('{"replica": "0"}', "MISSING_FIELD"),
    "not an object": ("[]", "BAD_TYPE"),
}


def test_names_that_would_drive_a_terminal_are_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(Path(files["d"]).read_text().replace('"target', '"\\u001b[2J', 1))
    for command in (["plan", str(path), files["d"]], ["check", files["d"], str(path)]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert "BAD_TEXT" in said.err
        assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_sentence(case: str, files: dict[str, str], tmp_path: Path, ran: Ran) -> None:
    text, says = BAD[case]
    path = tmp_path / "bad.json"
    if case != "not there":
        path.write_text(text)
    said = ran("check", path, files["d"], status=1)
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [[], ["--preset", "llama-3-70b", "--tp", "0"], ["--preset", "llama-3-70b", "--tp", "8", "--dcp", "3"], ["--preset", "llama-3-70b", "--nextn"],
     ["--preset", "llama-3-70b", "--fact", "weights"], ["--preset", "llama-3-70b", "--fact", "a=1", "--fact", "a=2"]],
)  # fmt: skip
def test_options_that_make_no_engine(options: list[str], ran: Ran) -> None:
    assert ran("describe", *options, status=1).startswith("error: ")


@pytest.mark.parametrize("option", ["--tokens=-5", "--tokens=18446744073709551616", "--first-token=-3", "--tokens=x"])
def test_tokens_that_no_request_has(option: str, files: dict[str, str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", files["p"], files["d"], option])
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["[]", "3", "null", "{", '{"num_hidden_layers": 1, "layer_types": [[]]}'])
def test_a_file_that_is_no_config(text: str, tmp_path: Path, ran: Ran) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    for args in ([str(config)], ["--preset", "llama-3-70b", "--draft", str(config)]):
        assert ran("describe", *args, status=1).startswith("error: ")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_plan_with_themselves_in_any_division(preset: str) -> None:
    config, *drafts = PRESETS[preset]
    sizes = [
        Parallel(),
        Parallel(tp=2 if "linear_conv_kernel_dim" in config or "conv_kernel" in config else 3),
        Parallel(tp=16),
        Parallel(tp=4, pp=3),
        Parallel(tp=8, dcp=4),
        Parallel(tp=2, cp=4, interleave=16),
    ]
    made = [describe(config, drafts, size) for size in sizes]
    for source in made:
        validate(source)
        for sink in made:
            found = plan(source, sink)
            # every byte that the sink owns comes from somewhere: as many layer-bytes as it owns
            assert all(found.required(rank.rank) for rank in sink.ranks)


@pytest.mark.parametrize("said", [["--deal", "zigzag"], ["--interleave", "16"], ["--origin", "5"]])
def test_one_rank_stores_every_token_however_they_would_be_dealt(
    said: list[str], capsys: pytest.CaptureFixture[str], ran: Ran
) -> None:
    """As for `lay_out`: a sweep over DCP 1, 2 and 4 changes one number."""
    for engine in ([], ["--engine", "sglang"]):
        options = ["describe", "--preset", "deepseek-v3-eagle3", "--tp", "4", *engine]
        assert [main(options), main([*options, *said])] == [0, 0]
        plain, dealt = capsys.readouterr().out.splitlines()
        assert plain == dealt
        assert "at deal: wanted runs of rank 0 alone" in ran(*options, "--deal", "0,1", status=1)


def test_page_is_one_file_with_the_whole_plan(files: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    assert main(["plan", files["p"], files["d"], "--html", str(out)]) == 0
    text = out.read_text()
    assert text.startswith("<!doctype html>")
    assert "/*data*/" not in text
    start = text.index("const plan = ") + len("const plan = ")
    data = json.JSONDecoder().raw_decode(text[start:])[0]
    assert (len(data["sources"]), len(data["sinks"]), len(data["groups"])) == (8, 4, 2)
    assert sum(one["sink"] == 1 for one in data["slices"]) == 6
    assert sum(data["bytes"].values()) == 8192 * (4 * 61 * 1152 + 2 * 8 * 256)
    assert not [word for word in ("http://", "https://", "src=", "href=") if word in text]


def test_a_part_in_sections_is_one_part_of_the_page(tmp_path: Path) -> None:
    files = []
    for split in (False, True):
        cache = Cache.paged(
            "kv", 2, parts={"k": (DType.U8, 2, (12, 4) if split else 16), "v": (DType.U8, 2, 16)}, page=4
        )
        files.append(tmp_path / f"{split}.json")
        files[-1].write_text(json.dumps(to_json(lay_out([cache]))))
    out = tmp_path / "plan.html"
    assert main(["plan", *map(str, files), "--html", str(out)]) == 0
    data = json.JSONDecoder().raw_decode(out.read_text().partition("const plan = ")[2])[0]
    (group,) = data["groups"]
    assert [(p["name"], p["lanes"] * p["lane_bytes"]) for p in group["parts"]] == [("k", 32), ("v", 32)]
    assert [(b["part"], b["lo"], b["hi"]) for b in data["boxes"]] == [(0, 0, 32), (1, 0, 32)]


def test_names_in_the_page_are_only_names(files: dict[str, str], tmp_path: Path) -> None:
    for side in ("p", "d"):
        data = json.loads(Path(files[side]).read_text())
        data["groups"][0]["name"] = "</script><b>"
        Path(files[side]).write_text(json.dumps(data))
    out = tmp_path / "plan.html"
    assert main(["plan", files["p"], files["d"], "--html", str(out)]) == 0
    assert "</script><b>" not in out.read_text()
    assert main(["plan", files["p"], files["d"], "--html", str(tmp_path / "no" / "plan.html")]) == 1


def test_describe_divides_tokens_layers_and_single_caches_as_told(ran: Ran) -> None:
    options = ["--preset", "deepseek-v3-eagle3", "--tp", "4", "--dcp", "2", "--interleave", "64", "--deal", "zigzag"]
    made = json.loads(ran("describe", *options, "--pp", "2", "--virtual", "2", "--own", "draft:tp=2,copies=no"))
    assert made["groups"][0]["order"] == ["0", "1", "1", "0"]
    assert [len(rank["owns"][0]["layers"]) for rank in made["ranks"]] == [31] * 4 + [30] * 4
    assert [len(rank["owns"]) for rank in made["ranks"]] == [1] * 4 + [2, 2, 1, 1]
    groups = json.loads(
        ran(
            "describe",
            *options,
            "--deal",
            "0,1,1",
            "--kv-dtype",
            "NVFP4",
            "--own",
            "draft:dcp=4,interleave=4,deal=3+2+1+0",
        )
    )["groups"]
    assert [g["order"] for g in groups] == [["0", "1", "1"], ["3", "2", "1", "0"]]
    assert [p["dtype"] for p in groups[1]["parts"]] == ["F4E2M1", "F4E2M1", "F8E4M3", "F8E4M3"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--deal", "zigzag-by-length"], "share of each request's length"),
        (["--deal", "0,x"], "at deal: wanted numbers, with , between, found 0,x"),
        (["--pp-layers", "1,-2"], "at pp_layers: wanted numbers"),
        (["--own", "draft"], "NAME:SIZE=N"),
        (["--own", "draft:pp=2"], "of the sizes tp, cp, dcp"),
        (["--own", "draft:tp=2,tp=1"], "each cache and size once"),
        (["--own", "draft:tp=2+1"], "at own draft.tp: wanted a number, found 2+1"),
        (["--own", "draft:copies=maybe"], "wanted yes or no, found maybe"),
        (["--own", "drift:tp=1"], "wanted one of target, draft, found drift"),
        (["--own", "draft:tp=3"], "a divisor of 4"),
        (["--own", "draft:tp=1", "--engine", "vllm"], "own: wanted no --own beside --engine, which divides its caches"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(options: list[str], says: str, ran: Ran) -> None:
    assert says in ran("describe", "--preset", "deepseek-v3-eagle3", "--tp", "4", "--dcp", "2", *options, status=1)


def test_names_in_the_page_are_text() -> None:
    """A group's name is anybody's; what is written as markup into a page would run in the browser of who reads it."""
    page = (ROOT / "kvproto/cli/page.html").read_text()
    for written in re.findall(r"(?:innerHTML =|insertAdjacentHTML\(|inner \+=|strip \+=)(.*)", page):
        names = re.findall(r"\w+\.name", written)
        assert [f"text({name})" for name in names] == re.findall(r"text\(\w+\.name\)", written)


def test_conversion_is_stated_and_chosen(tmp_path: Path, ran: Ran) -> None:
    """A BF16 Description and an FP8 one fit if both state a conversion; what it does to dtypes is a warning."""
    sides = []
    for name, more in (("p", ["--tp", "8"]), ("d", ["--tp", "4", "--kv-dtype", "F8E4M3"])):
        stated = "e4m3_tensor" + "=0.03" * (name == "d")
        sides.append(tmp_path / f"{name}.json")
        sides[-1].write_text(ran("describe", "--preset", "llama-3-70b", *more, "--convert", stated))
    assert "both state e4m3_tensor: choose feature CONVERT too" in ran("check", *sides, status=3)
    warning = "warning: groups[target].parts[k].dtype: prefill has BF16, decode has F8E4M3"
    assert warning in ran("check", *sides, "--convert")
    last = "target.v  P7           layers 0-79; lanes 7  layers 0-79; lanes 1  layers 0-79; lanes 0\n"
    assert ran("plan", *sides, "--convert", "--slices").endswith(last)


def test_a_conversion_that_the_cache_cannot_have_is_an_error(ran: Ran) -> None:
    fp8 = ["describe", "--preset", "llama-3-70b", "--kv-dtype", "F8E4M3", "--convert"]
    assert "a part of F32 that scales k" in ran(*fp8, "e4m3_block", status=1)
    assert "scales of a narrow part that states them" in ran(*fp8, "e4m3_tensor", status=1)
    assert "convert: wanted e4m3_tensor, e4m3_block" in ran(*fp8, "e5m2", status=1)
