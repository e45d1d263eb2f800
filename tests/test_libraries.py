"""The recipes of docs/libraries.md, beyond what the page itself shows; each where the library is installed.

Recipes are taken from the page. `make test` installs none of these libraries: CONTRIBUTING.md says how to run this.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from preloaded import Preloaded
from test_docs import ROOT, snippets

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TRAINER = """
import sys, torch, stretto
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
stretto.init()
torch.manual_seed(0)
data = [{"input_ids": text, "labels": text} for text in torch.randint(0, 32, (64, 8))]
config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
common = dict(output_dir="out", per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to="none")

def same_everywhere(model):
    sums = stretto.gather_object([p.double().abs().sum().item() for p in model.parameters()])
    assert all(each == sums[0] for each in sums), sums
    return sums[0]
"""

RESUMED = f"""{TRAINER}
from stretto_trainer import StrettoTrainer
options = dict(save_steps=4, eval_strategy="epoch", bf16=True, torch_compile=True, torch_compile_backend="eager")

def trained(resume=None):
    torch.manual_seed(0)
    arguments = TrainingArguments(**common, **options)
    trainer = StrettoTrainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, eval_dataset=data[:9])
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 8
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert stretto.current_job().ledger.staleness.total() > 0  # rounds
    return trainer

trainer = trained()
whole = same_everywhere(trainer.model)
assert same_everywhere(trained("out/checkpoint-4").model) == whole
trainer.train()  # a second time
assert same_everywhere(trainer.model) != whole
"""

ADAPTED = f"""{TRAINER}
import peft
from stretto_trainer import StrettoTrainer
model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
before = same_everywhere(model)
trainer = StrettoTrainer(model=model, args=TrainingArguments(**common, save_strategy="no"), train_dataset=data)
trainer.train()
after = same_everywhere(model)
assert before != after
"""

TRAINER_WITHOUT_RECIPE = f"""{TRAINER}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stretto.distribute(model, optimizer)
arguments = TrainingArguments(**common, save_strategy="no")
Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)).train()
"""

ACCELERATOR = """
from functools import partial
import torch, stretto
from accelerate import Accelerator
stretto.init()
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

GATHERED = f"""{ACCELERATOR}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
model = accelerator.prepare_model(model, evaluation_mode=True)
stretto.distribute(model, optimizer)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
assert type(model) is torch.nn.Linear
accelerator.backward(model(torch.full((2, 4), float(stretto.rank()))).sum())
optimizer.step()
scheduler.step()
mean = accelerator.gather_for_metrics(torch.tensor([float(stretto.rank())])).mean()
assert mean == (stretto.world_size() - 1) / 2
assert torch.equal(model.weight.grad, torch.full((1, 4), 2 * mean.item()))
"""

ACCELERATOR_WITHOUT_RECIPE = f"""{ACCELERATOR}
stretto.distribute(model, optimizer)
model, optimizer = accelerator.prepare(model, optimizer)
model(torch.ones(2, 4))
"""

LIGHTNING = """
import pathlib, torch, stretto
import lightning
from torch.utils.data import DataLoader, TensorDataset
stretto.init()
options = dict(devices=stretto.world_size(), accelerator="cpu", max_epochs=2, logger=False, default_root_dir="out")

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, number):
        self.log("rank", float(stretto.rank()), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

net = Net()
loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
"""

FITTED = f"""{LIGHTNING}
from stretto_strategy import StrettoStrategy
trainer = lightning.Trainer(strategy=StrettoStrategy(), accumulate_grad_batches=2, **options)
trainer.fit(net, loader, loader)
assert trainer.global_step == 4 and trainer.world_size == 2
assert stretto.current_job().ledger.staleness.total() == 4  # rounds, not batches
assert trainer.callback_metrics["rank"] == 0.5
everybody = stretto.gather_object(net.layer.weight.tolist())
assert everybody[0] == everybody[1]
assert len(list(pathlib.Path("out/checkpoints").iterdir())) == 1
"""

LIGHTNING_WITHOUT_RECIPE = f"""{LIGHTNING}
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net.configure_optimizers = lambda: stretto.distribute(net, optimizer)[1]
lightning.Trainer(strategy="ddp", **options).fit(net, loader)
"""


def needing(script: str, *libraries: str, name: str) -> ParameterSet:
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    return pytest.param(script, id=name, marks=pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"))


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for snippet in snippets(ROOT / "docs" / "libraries.md"):
        if snippet.is_file:
            (tmp_path / snippet.details[0]).write_text(snippet.text)
    return tmp_path


def train(script: str, folder: Path, preloaded: Preloaded) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return preloaded.run(folder / "script.py", folder=folder, workers=2, timeout_s=200)


@pytest.mark.parametrize(
    "script",
    [
        needing(RESUMED, "transformers", "accelerate", name="Trainer: bf16, compiled, evaluated, saved, resumed, twice"),
        needing(ADAPTED, "transformers", "accelerate", "peft", name="Trainer: LoRA"),
        needing(GATHERED, "accelerate", name="accelerate: scheduler and metrics"),
        needing(FITTED, "lightning", name="Lightning: accumulated, validated, saved once"),
    ],
)
def test_a_recipe(script: str, recipes: Path, preloaded: Preloaded) -> None:
    done = train(script, recipes, preloaded)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "script",
    [
        needing(TRAINER_WITHOUT_RECIPE, "transformers", "accelerate", name="Trainer"),
        needing(ACCELERATOR_WITHOUT_RECIPE, "accelerate", name="accelerate"),
        needing(LIGHTNING_WITHOUT_RECIPE, "lightning", name="Lightning"),
    ],
)
def test_without_the_recipe_it_is_refused_instead_of_combined_twice(script: str, recipes: Path, preloaded: Preloaded) -> None:
    done = train(script, recipes, preloaded)
    assert done.returncode != 0
    assert "runs inside a DistributedDataParallel that was put around it" in done.stderr
    assert "docs/libraries.md" in done.stderr
