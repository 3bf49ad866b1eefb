"""The texts that models learn from, and the fine-tuning task, on files made here."""

import dataclasses
import json
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from experiments.curves import held_out, kept, minilm, pool, topics
from experiments.curves.run import Run
from zofftk.errors import InputError

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


# -- held-out text -------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch, tmp_path):
    """200 modules, some of them packages of two files."""
    files = {Path(f"module{i}.py"): f"value = {i}\n" for i in range(150)}
    for i in range(50):
        files |= {Path(f"package{i}/{name}.py"): f"{name} = {i}\n" for name in ("one", "two")}
    files[Path("encodings/table.py")] = "table = 0\n"
    monkeypatch.setattr(held_out, "read_stdlib_files", lambda: files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    held_out.load_split.cache_clear()
    yield files
    held_out.load_split.cache_clear()


def test_a_module_is_held_out_as_a_whole_or_not_at_all(library):
    training, held, data = held_out.load_split(256)
    lines = {bytes(part.tokens).decode() for part in (training, held)}
    shown = {file for file, text in library.items() if text.strip() in bytes(held.tokens).decode().split("\n")}
    assert shown == {file for file in library if held_out.is_held_out(file)} - {Path("encodings/table.py")}
    assert 4 <= len(shown) <= 30
    of_packages = Counter(file.parts[0] for file in shown if len(file.parts) == 2)
    assert of_packages
    assert set(of_packages.values()) == {2}
    assert not any("table" in text for text in lines)
    assert data["training"]["files"] + data["held_out"]["files"] == 250


def test_held_out_text_is_in_a_vocabulary_that_is_learnt_from_the_rest(library):
    training, held, _ = held_out.load_split(300)
    files = [file for file in library if file.parts[0] != "encodings"]
    texts = ["\n".join(library[file] for file in files if held_out.is_held_out(file) == held) for held in (False, True)]
    learnt, apart = held_out.load_parts([texts[0], "value = 7\n"], vocab=300)
    assert learnt.tokens.tolist() == training.tokens.tolist()  # whatever the other text is
    assert apart.tokens.tolist() != held.tokens.tolist()
    alone = held_out.load_parts([texts[1]], vocab=300)[0]
    assert alone.tokens.tolist() != held.tokens.tolist()  # in a vocabulary of its own
    assert alone.fingerprint != held.fingerprint


# -- topics --------------------------------------------------------------------------------------------------


def made_up_topics(per_file: int = 20, files: int = 20) -> dict[str, dict[str, list[str]]]:
    return {
        topic: {
            f"{topic}/{i}.py": [f"{topic} text {j} of file {i} in all" for j in range(per_file)] for i in range(files)
        }
        for topic in ("p.one", "p.two", "p.three")
    }


def test_training_and_test_texts_come_from_different_files():
    found = topics.split_topics(made_up_topics(), ("p",))
    assert found.names == ["p.one", "p.three", "p.two"]
    files = [
        {(label, text.split(" of ")[1]) for label, text in topics.rows(part)} for part in (found.training, found.test)
    ]
    assert files[0]
    assert files[1]
    assert not files[0] & files[1]
    for part in (found.training, found.test):
        assert all(text.startswith(found.names[label] + " ") for label, text in topics.rows(part))
    assert set(Counter(found.training.labels).values()) == {topics.MAX_TRAINING}
    assert set(Counter(found.test.labels).values()) == {topics.MAX_TEST}


def test_a_test_share_of_whole_files():
    training, test = topics.split_files({f"{i}.py": [f"text {i} {j}" for j in range(10)] for i in range(40)})
    assert (len(training), len(test)) == (300, 100)


def test_a_text_that_was_trained_on_is_not_tested():
    by_topic = made_up_topics()
    common = "the very same words stand in every file"
    for files in by_topic.values():
        for texts in files.values():
            texts[:10] = [common] * 10
    found = topics.split_topics(by_topic, ("p",))
    assert common in found.training.texts
    assert common not in found.test.texts
    assert len(set(found.test.texts)) == len(found.test.texts)


def test_topics_with_few_texts_are_left_out():
    by_topic = made_up_topics() | {"p.small": {f"{i}.py": [f"small {i}"] for i in range(20)}}
    by_topic["p.one_file"] = {"only.py": [f"text {i}" for i in range(999)]}
    assert topics.split_topics(by_topic, ("p",)).names == ["p.one", "p.three", "p.two"]
    with pytest.raises(InputError, match="expected docstrings of at least 2 subpackages of p, q, got 0"):
        topics.split_topics({}, ("p", "q"))


def test_paragraphs_are_the_first_of_docstrings(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        '"""Not the module\'s own, which says what all others say."""\n'
        "def f():\n    '''One two three\n    four five six.\n\n    Not this.'''\n"
        "class C:\n    '''Too short.'''\n    async def g(self):\n        r'''Six words or more \\d in here.'''\n"
    )
    assert topics.read_paragraphs(file) == ["One two three four five six.", "Six words or more \\d in here."]
    file.write_text("this is no Python")
    assert topics.read_paragraphs(file) == []


def test_real_packages_give_texts():
    found = topics.read_package("networkx")
    assert {"networkx.algorithms", "networkx.generators"} <= found.keys()
    assert all(len(text.split()) >= topics.MIN_WORDS for text in found["networkx.generators"]["generators/trees.py"])


# -- the pre-trained model -----------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(minilm, "find_spec", lambda name: None if name == "all_minilm_l6_v2" else object())
    with pytest.raises(InputError, match=r"all_minilm_l6_v2 is missing: in the checkout, pip install -e '.\[exp"):
        minilm.find_archive()


def test_a_missing_package_is_told_before_any_run(monkeypatch):
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    monkeypatch.setattr(pool, "train_run", lambda run: pytest.fail("a run was begun"))
    gpt = dataclasses.replace(RUN, task="gpt", model="1.3m")
    with pytest.raises(InputError, match="is missing"):
        pool.train_all([gpt, RUN], workers=1)


def test_an_archive_that_is_none_is_named(monkeypatch, tmp_path):
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(minilm, "find_spec", lambda name: spec)
    monkeypatch.setattr(minilm, "version", lambda name: "1")
    with pytest.raises(InputError, match=r"expected the model's weights as a zip file, .*model.zip is none"):
        minilm.find_archive()
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", "{}")
    assert minilm.find_archive() == tmp_path / "model.zip"


@pytest.fixture
def tiny_package(monkeypatch, tmp_path):
    """A package like the real one, with a small BERT of random weights and a vocabulary of ten words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from safetensors.torch import save

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "initializer_range": 0.5,
    }
    config = transformers.BertConfig(vocab_size=12, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    weights = transformers.BertModel(config).state_dict()
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: number for number, word in enumerate(WORDS, start=2)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", json.dumps(config.to_dict()))
        archive.writestr("model.safetensors", save({name: value.clone() for name, value in weights.items()}))
        archive.writestr("tokenizer.json", tokenizer.to_str())
    monkeypatch.setattr(minilm, "find_archive", lambda: tmp_path / "model.zip")
    monkeypatch.setattr(minilm, "version", lambda name: "1")
    minilm.load_minilm.cache_clear()
    yield weights
    minilm.load_minilm.cache_clear()


def test_the_encoder_has_the_packages_weights(tiny_package):
    model = minilm.load_minilm().build(topics=3, seed=0, dtype=torch.bfloat16)
    for name, value in model.bert.state_dict().items():
        assert torch.equal(value, tiny_package[name].to(value.dtype)), name
    assert model.classifier.weight.shape == (3, 16)
    again, other = (minilm.load_minilm().build(topics=3, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    assert torch.equal(model.classifier.weight, again.classifier.weight)
    assert not torch.equal(model.classifier.weight, other.classifier.weight)


RUN = Run(
    experiment="quick/test",
    task="bert",
    model="minilm",
    optimizer="AdamW",
    update="delayed",
    delay_after=1,
    lr=1e-2,
    seed=0,
    steps=8,
    batch_size=4,
    evaluate_every=4,
)


@pytest.fixture
def task(tiny_package, tmp_path, monkeypatch):
    """Texts whose topic is a word in them."""
    from experiments.curves import bert

    splits = []
    for count in (5, 3):
        texts = [f"{WORDS[label]} {WORDS[3 + i]} gamma" for label in range(3) for i in range(count)]
        splits.append(topics.Split(texts=texts, labels=[label for label in range(3) for _ in range(count)]))
    found = topics.Topics(packages=("p",), names=WORDS[:3], training=splits[0], test=splits[1])
    monkeypatch.setattr(bert, "load_topics", lambda packages: found)
    monkeypatch.setattr(topics, "version", lambda name: "1")
    monkeypatch.setattr(kept, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(kept, "CHECKPOINTS", tmp_path / "runs")
    monkeypatch.setattr(bert, "TEXTS_ON_THE_WAY", 5)
    return bert.BertTask(RUN)


def test_each_text_comes_once_an_epoch(task):
    epochs = [torch.cat([task.order(3 * epoch + step) for step in range(3)]).tolist() for epoch in range(2)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == 12  # of 15: an odd rest is left out
    assert epochs[0] != epochs[1]
    assert task.order(1).tolist() == task.order(1).tolist()


def test_filling_is_not_read(task):
    from experiments.curves.bert import logits_of

    model = task.pretrained.build(topics=3, seed=0, dtype=torch.float32).eval()
    short, long = (task.pretrained.encode([text], length=32) for text in ("alpha beta", "alpha beta gamma " * 9))
    alone, beside = logits_of(model, short), logits_of(model, torch.cat([short, long]))
    assert torch.allclose(beside[0], alone[0], atol=1e-6)
    assert not torch.allclose(beside[1], alone[0], atol=1e-5)


def test_dropout_is_the_steps_own(task):
    model = task.build().train()
    torch.manual_seed(5)
    one = task.loss(model, 0)
    torch.manual_seed(6)
    assert torch.equal(task.loss(model, 0), one)
    with torch.no_grad():
        outside = torch.rand(1)
        torch.manual_seed(6)
        assert torch.equal(torch.rand(1), outside)  # and leaves the program's random numbers alone
    other = type(task)(dataclasses.replace(RUN, seed=1))
    other.order = task.order  # the same texts
    assert not torch.equal(other.loss(model, 0), one)


def test_an_interrupted_fine_tuning_goes_on_with_the_same_bits(task):
    from experiments.curves.trainer import train_run

    assert train_run(RUN)
    whole = kept.load_record(RUN)
    kept.forget(RUN)
    assert not train_run(RUN, stop_after=3)
    assert train_run(RUN)
    again = kept.load_record(RUN)
    assert whole is not None
    assert again is not None
    assert again["samples"] == whole["samples"]
    assert {name: again["results"][name] for name in ("held_out_loss", "accuracy", "macro_f1")} == {
        name: whole["results"][name] for name in ("held_out_loss", "accuracy", "macro_f1")
    }
    assert whole["data"]["texts"] == {"training": 15, "test": 9}


def test_macro_f1_is_the_mean_over_topics():
    from experiments.curves.bert import macro_f1

    labels, guesses = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 2, 0])
    # Topic 0: 2 of 3 found, 2 of 3 right; topic 1: 1 of 2, 1 of 2; topic 2: none.
    assert macro_f1(guesses, labels) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert macro_f1(labels, labels) == 1.0
