"""GPT-2 and Llama as Hugging Face has them, where transformers is installed (CONTRIBUTING.md says how to run this)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from mesh.models import build, copied, distance, mesh_of
from stretto.job import Job
from stretto.mesh.cutting import tensor_parallel
from stretto.testing import run_jobs

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
WORDS, WIDTH = 96, 32


def gpt2() -> Any:
    nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, **nothing)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=32, **heads
    )
    return transformers.LlamaForCausalLM(config)


def trained(model: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(20):
        batch = torch.randint(WORDS, (4, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return copied(model.state_dict())


@pytest.mark.parametrize("vocabulary", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_it_trains_as_in_one_process(make: Any, vocabulary: bool) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def program(job: Job) -> tuple[dict[str, Tensor], int]:
        layout = stretto.recipes.megatron(vocabulary=vocabulary)
        model = tensor_parallel(build(make, seed=job.rank), mesh_of(job, model=2), layout)
        return trained(model), sum(p.numel() for p in model.parameters())

    expected = trained(build(make))
    for state, held in run_jobs(2, program):
        assert distance(state, expected) < 1e-5
        assert held < 0.7 * sum(p.numel() for p in build(make).parameters())
