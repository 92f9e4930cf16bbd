"""Training loops of other packages around fused modules: Accelerate, transformers, Lightning.

Each trains a model plain and fused; what they save can be loaded by either.
"""

import pytest
import torch

import autofuse

EXTRA = "a training loop of another package: '.[test-frameworks]'"
# they write nowhere but to `tmp_path`, which a second run finds full, and warn of few workers
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 64)
        self.second = torch.nn.Linear(64, 1)

    def forward(self, x, labels):
        h = self.first(x)
        h = torch.sigmoid(h) * torch.tanh(h + 1) * 0.5 + h * 0.1
        out = self.second(h)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


def examples(count=32):
    xs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return [{"x": x, "labels": x.sum()[None]} for x in xs]


def loader():
    return torch.utils.data.DataLoader(examples(), batch_size=8)


def both(train):
    """Train plain and fused, and compare what was learnt: on the CPU bits may differ."""
    plain = train(Net())
    autofuse.reset_stats()
    fused = train(autofuse.fuse(Net()))
    assert autofuse.stats().ops_recorded > 0
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert type(other) is torch.nn.Parameter
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    plain.load_state_dict(fused.state_dict())


def test_accelerate():
    accelerate = pytest.importorskip("accelerate", reason=EXTRA)

    def train(net):
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        model, optimizer, batches = accelerator.prepare(net, optimizer, loader())
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.unwrap_model(model)

    both(train)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate", reason=EXTRA)
    transformers = pytest.importorskip("transformers", reason=EXTRA)

    def train(net):
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=8, num_train_epochs=2,
            save_strategy="epoch", eval_strategy="epoch", report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(net, settings, None, examples(), examples(8))
        trainer.train()
        assert trainer.evaluate()["eval_loss"] > 0
        return net

    both(train)


@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the task"])
def test_lightning(tmp_path, whole):
    lightning = pytest.importorskip("pytorch_lightning", reason=EXTRA)

    class Task(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, batch):
            return self.net(**batch)["loss"]

        def training_step(self, batch, index):
            loss = self(batch)
            self.log("loss", loss)
            assert type(loss) is torch.Tensor
            return loss

        def validation_step(self, batch, index):
            self.log("val", self(batch))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    def train(net):
        task = Task(net)
        if whole and getattr(type(net), "_autofuse_fused", False):
            task = autofuse.fuse(task)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", default_root_dir=str(tmp_path), logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(task, loader(), loader())
        path = trainer.checkpoint_callback.best_model_path
        again = Task.load_from_checkpoint(path, net=Net())
        assert again.state_dict().keys() == task.state_dict().keys()
        return task.net

    both(train)
