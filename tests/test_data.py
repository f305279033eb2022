"""A sequence is a function of its number, and each pass covers the corpus once."""

import gzip
import hashlib
from dataclasses import replace

import numpy as np
import pytest

from jaxshard.train import data
from jaxshard.train.config import ConfigError, DataConfig

SHAPE = {"context": 16, "vocab": 256}


@pytest.fixture
def counted(tmp_path):
    """A file of the 16-bit tokens 0, 1, 2, ...: a window shows where it was cut."""
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    return DataConfig(files=(str(path),), format="uint16", batch=4, held_out=0.2)


def train_batches(corpus, config, **shape):
    """The batches of a run by their step, from 0."""
    sequences = data.train_sequences(corpus, config, **shape)
    return lambda step: sequences(step * config.batch + np.arange(config.batch))


def test_the_embedded_corpus_is_text_and_always_the_same():
    text = data.python_documentation()
    assert len(text) > 300_000
    assert b'The "assert" statement' in text or b'The "with" statement' in text
    assert hashlib.sha256(text).digest() == hashlib.sha256(data.python_documentation()).digest()
    assert max(text) < 256


def test_a_pass_covers_every_window_once(counted):
    batches = train_batches(data.read(counted), counted, context=16, vocab=1000)
    windows = (800 - 1) // 16
    assert windows % counted.batch == 1, "else the end of a pass falls between two batches"
    rows = np.concatenate([batches(step)["inputs"] for step in range(2 * windows // counted.batch + 1)])
    first, second = rows[:windows, 0], rows[windows : 2 * windows, 0]
    assert sorted(first) == sorted(second) == list(range(0, windows * 16, 16))
    assert list(first) != sorted(first)
    assert list(first) != list(second), "each pass has an order of its own"


def test_targets_are_the_next_tokens(counted):
    batch = train_batches(data.read(counted), counted, context=16, vocab=1000)(3)
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)
    assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in batch.items()} == {
        "inputs": ((4, 16), "int32"),
        "targets": ((4, 16), "int32"),
        "weights": ((4, 16), "float32"),
    }


def test_a_step_has_one_batch_whenever_it_is_asked_for(counted):
    corpus = data.read(counted)
    one = train_batches(corpus, counted, context=16, vocab=1000)
    other = train_batches(corpus, counted, context=16, vocab=1000)
    expected = [one(step)["inputs"] for step in range(30)]
    for step in (29, 0, 17, 17):
        np.testing.assert_array_equal(other(step)["inputs"], expected[step])
    reseeded = train_batches(corpus, replace(counted, seed=1), context=16, vocab=1000)
    assert not np.array_equal(reseeded(0)["inputs"], expected[0])


def test_no_token_is_trained_on_and_held_out(counted):
    corpus = data.read(counted)
    assert corpus.sizes == (800, 200)
    batches = data.held_out_batches(corpus, counted, context=16, vocab=1000, batches=2)
    assert [batch["inputs"].shape for batch in batches] == [(4, 16), (4, 16)]
    tokens = np.concatenate([batch["inputs"] for batch in batches])
    assert tokens.min() == 800
    assert len(np.unique(tokens)) == tokens.size
    fewer = data.held_out_batches(corpus, replace(counted, batch=100), context=16, vocab=1000, batches=2)
    assert [len(batch["inputs"]) for batch in fewer] == [(200 - 1) // 16]


def test_windows_do_not_cross_files(tmp_path):
    for name, byte in (("a", b"a"), ("b", b"b")):
        (tmp_path / name).write_bytes(byte * 100)
    config = DataConfig(files=(str(tmp_path / "a"), str(tmp_path / "b")), batch=10, held_out=0.2)
    batch = train_batches(data.read(config), config, context=16, vocab=256)(0)
    joined = np.concatenate([batch["inputs"], batch["targets"]], axis=1)
    assert set(joined[:, 0]) == {ord("a"), ord("b")}
    assert np.all(joined == joined[:, :1])


@pytest.mark.parametrize(("format", "top"), [("uint16", 60_000), ("uint32", 100_000)])
def test_token_files_are_read_as_numbers(tmp_path, format, top):
    path = tmp_path / "tokens.bin"
    np.linspace(0, top, 400).astype(format).tofile(path)
    config = DataConfig(files=(str(path),), format=format, batch=2)
    corpus = data.read(config)
    assert corpus.sizes == (360, 40)
    assert corpus.held_out[0][-1] == top


def test_a_token_beyond_the_vocabulary_is_refused(counted):
    with pytest.raises(ConfigError, match=r"a token 799, and model\.vocab = 500"):
        train_batches(data.read(counted), counted, context=16, vocab=500)


def test_a_token_in_the_middle_of_a_large_file_is_refused_when_it_is_read(counted, monkeypatch):
    monkeypatch.setattr(data, "READ", 10)
    tokens = np.zeros(1000, "<u2")
    tokens[400] = 500
    tokens.tofile(counted.files[0])
    batches = train_batches(data.read(counted), counted, context=16, vocab=500)
    with pytest.raises(ConfigError, match=r"a token 500, and model.vocab = 500"):
        [batches(step) for step in range(20)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": ("absent.txt",)}, "cannot read absent.txt of data.files: No such file"),
        ({"files": (), "format": "uint16"}, "the default corpus is text"),
        ({"format": "uint32", "files": ("odd",)}, "odd has 5 bytes, which is no number of uint32 tokens"),
        ({"format": "text", "files": ("empty",)}, "empty has 0 bytes"),
        ({"format": "text", "files": ("zeros",)}, "zeros has zero bytes, so it is no text"),
        ({"format": "uint16", "files": ("array.npy",)}, "array.npy of data.files is a .npy file"),
        ({"format": "text", "files": ("text.gz",)}, "text.gz of data.files is compressed by gzip"),
        ({"format": "text", "files": (".",)}, "cannot read . of data.files"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd").write_bytes(b"12345")
    (tmp_path / "empty").touch()
    (tmp_path / "zeros").write_bytes(b"a\0b\0")
    np.save(tmp_path / "array.npy", np.arange(100, dtype="<u2"))
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"text" * 100))
    with pytest.raises(ConfigError, match=message):
        data.read(DataConfig(**change))


def test_a_text_too_short_for_one_window(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 100)
    config = DataConfig(files=(str(path),), held_out=0.1)
    corpus = data.read(config)
    with pytest.raises(ConfigError, match="there are 90 tokens to train on, and no 129 together in one file"):
        train_batches(corpus, config, context=128, vocab=256)
    with pytest.raises(ConfigError, match="there are 10 tokens to hold out"):
        data.held_out_batches(corpus, config, context=16, vocab=256, batches=1)


def test_a_corpus_is_known_again(tmp_path):
    """By the sizes of its files, where they are cut, and what they hold at both ends."""
    path = tmp_path / "text"

    def digests(text: bytes, held_out: float = 0.1):
        path.write_bytes(text)
        return data.read(DataConfig(files=(str(path),), held_out=held_out)).digests

    text = b"x" * 500
    assert digests(text) == digests(text)
    others = [digests(text, 0.2), digests(text + b"x"), digests(b"y" + text[1:]), digests(text[1:] + b"y")]
    assert len({digests(text), *others}) == 5
