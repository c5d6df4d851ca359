"""SGLang's metadata buffers as hand-off data: a row at prefill becomes a row at decode."""

from types import SimpleNamespace

import pytest
import torch

from kvproto_sglang import metadata, tickets
from tests.sglang.standins import buffers


def test_a_row_arrives_in_the_row_of_the_request() -> None:
    theirs, ours = buffers(), buffers()
    theirs.output_ids[1, 0], theirs.cached_tokens[1, 3], theirs.output_top_logprobs_val[1, 2] = 77, 9, -1.5
    theirs.output_token_logprobs_val[1, 0] = -0.25
    sent = metadata.read(theirs, 1, metadata.names_of(theirs, "all", False))
    metadata.write(ours, 2, 1 << 62, sent, None)
    assert (ours.output_ids[2, 0], ours.cached_tokens[2, 3], ours.output_top_logprobs_val[2, 2]) == (77, 9, -1.5)
    assert (ours.output_token_logprobs_val[2, 0], ours.output_token_logprobs_idx[2, 0]) == (-0.25, 77)
    assert int(ours.bootstrap_room[2, 0]) == 1 << 62
    assert not ours.output_ids[[0, 1, 3]].any()


def test_what_a_draft_starts_with_arrives() -> None:
    theirs, ours = buffers(draft_index=5), buffers(draft_index=5)
    theirs.output_hidden_states[1] = torch.arange(8)
    theirs.output_topk_p[1, 1], theirs.output_topk_index[1, 1] = 0.5, 1 << 40
    theirs.output_dsa_topk_indices[1] = torch.arange(5, dtype=torch.int32)
    names = metadata.names_of(theirs, "all", True)
    assert set(metadata.DRAFTED) <= set(names)
    metadata.write(ours, 2, 5, metadata.read(theirs, 1, names), None)
    assert torch.equal(ours.output_hidden_states[2], theirs.output_hidden_states[1])
    assert (ours.output_topk_p[2, 1], ours.output_topk_index[2, 1]) == (0.5, 1 << 40)
    assert ours.output_dsa_topk_indices[2].tolist() == [0, 1, 2, 3, 4]


def test_a_draft_never_starts_with_what_an_earlier_request_left() -> None:
    made = buffers(draft_index=5)
    made.output_hidden_states[0], made.output_topk_p[0], made.output_dsa_topk_indices[0] = 3, 3, 3
    metadata.write(made, 0, 5, {}, 123)
    assert not made.output_hidden_states.any()
    assert not made.output_topk_p.any()
    assert (made.output_dsa_topk_indices == -1).all()


def test_an_engine_without_a_draft_or_masks_hands_none_over() -> None:
    names = metadata.names_of(buffers(), "all", False)
    assert not {*metadata.DRAFTED, *tickets.MASKED} & set(names)


def test_a_mask_is_handed_over_where_sglang_keeps_some() -> None:
    made = buffers()
    made.output_token_sampling_mask_len = torch.zeros((4, 16), dtype=torch.int32)
    assert "sglang.mask_length" in metadata.names_of(made, "all", False)
    assert "sglang.mask_tokens" not in metadata.names_of(made, "all", False)


def test_hidden_states_are_of_the_type_that_the_buffer_is() -> None:
    (cache,) = metadata.cache_of(buffers(), ("hidden",))
    assert [(part.name, part.lane_bytes) for part in cache.group.parts] == [("hidden", 16)]
    other = SimpleNamespace(**vars(buffers()) | {"output_hidden_states": torch.zeros((4, 8), dtype=torch.float64)})
    with pytest.raises(Exception, match="output_hidden_states"):
        metadata.cache_of(other, ("hidden",))


def test_a_first_token_that_a_router_knows_needs_no_metadata() -> None:
    made = buffers()
    metadata.write(made, 0, 5, {}, 123)
    assert (int(made.output_ids[0, 0]), int(made.bootstrap_room[0, 0])) == (123, 5)
    assert metadata.cache_of(made, ()) == []
