from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.account.errors import UserError
from headway.model.forward import forward_logits
from headway.model.gguf import convert_gguf
from headway.model.load import load_model
from model.tiny_models import batch_of, documents

gguf = pytest.importorskip("gguf")

HIDDEN, FEED, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnop", "ab", "cd"]
TEMPLATE = "{% for message in messages %}{{ message['content'] + '</s>' }}{% endfor %}"


def write_gguf(file: Path, template: str | None = TEMPLATE) -> None:
    """A llama of two layers with random weights, one of them quantised, and a byte-pair tokenizer."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if template:
        writer.add_chat_template(template)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    kv = HIDDEN * KV_HEADS // HEADS
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,), f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN), f"blk.{layer}.attn_k": (kv, HIDDEN),
            f"blk.{layer}.attn_v": (kv, HIDDEN), f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (FEED, HIDDEN), f"blk.{layer}.ffn_up": (FEED, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, FEED),
        }  # fmt: skip
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = generator.normal(size=shape).astype(np.float32)
        if name.endswith("ffn_up"):
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_model_computes_the_same_and_keeps_its_tokenizer(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    convert_gguf(file, tmp_path / "out")
    direct = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    with pytest.raises(Exception):  # noqa: B017  (why the conversion exists; any error will do)
        direct.save_pretrained(tmp_path / "direct")
    loaded = load_model(path=tmp_path / "out", attention="eager").eval()
    batch = batch_of([documents([9], vocab=len(TOKENS))])
    assert torch.equal(forward_logits(loaded, batch), forward_logits(direct.eval(), batch))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    original = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "</s>"
    assert tokenizer("abcdp").input_ids == original("abcdp").input_ids
    assert tokenizer.decode(tokenizer("abcdp", add_special_tokens=False).input_ids) == "abcdp"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    generated = loaded.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > 2


def test_the_library_is_left_as_it_was(tmp_path):
    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    with pytest.raises(UserError):
        convert_gguf(__file__, tmp_path / "out")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == originals


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(UserError, match="no such GGUF file"):
        convert_gguf(tmp_path / "missing.gguf", tmp_path / "out")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(UserError, match=r"torn\.gguf cannot be read as GGUF") as error:
        convert_gguf(tmp_path / "torn.gguf", tmp_path / "out")
    assert "\n" not in str(error.value)
    write_gguf(tmp_path / "mute.gguf", template=None)
    with pytest.raises(UserError, match="no chat template"):
        convert_gguf(tmp_path / "mute.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
