"""``ds-muon config``: DeepSpeed configs to copy, which the wheel has as the repository does."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_muon.say import tell
from ds_muon.text import columns

DESCRIPTION = """\
Print a DeepSpeed config to start from: ds-muon config NAME > ds_config.json. Without a name, list them.
"""
SUMMARIES = {
    "zero1_bf16": "ZeRO-1 in bf16, gradients accumulated in fp32 over 4 micro-batches",
    "zero1_fp16": "ZeRO-1 in fp16, dynamic loss scale",
    "zero1_fp32": "ZeRO-1 in fp32",
    "zero2_bf16": "ZeRO-2 in bf16: where to start",
    "zero2_bf16_guarded": "the same with NorMuon; a step with a bad update or a spike is skipped",
    "zero2_offload": "ZeRO-2 in bf16, the optimizer's state on the host",
    "zero2_fp16": "ZeRO-2 in fp16, dynamic loss scale",
    "zero2_fp32": "ZeRO-2 in fp32",
    "hf_auto": "Hugging Face Trainer fills in the rest; learning_rate is AdamW's",
    "lora": "adapters, as PEFT makes them, at a rate of AdamW; for Trainer take hf_auto",
    "moe": "experts as transformers stacks them, gate and up apart",
    "from_deepspeed_muon": "the keys of DeepSpeed's Muon, with both rates and reduce_scatter set",
    "demo_dsmuon": "the demo's, in fp32",
    "demo_normuon": "the demo's with NorMuon",
    "demo_adamw": "the demo's with AdamW, to compare",
}


def folder() -> Path:
    """Where the files are: beside this one in a wheel, else at the top of the repository."""
    here = Path(__file__).parent
    return next(found for found in (here / "ds_configs", here.parent / "ds_configs") if found.is_dir())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon config``."""
    parser.description = DESCRIPTION
    parser.add_argument("name", nargs="?", metavar="NAME", choices=SUMMARIES, help="which one to print")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a config, or the list. Returns the exit code."""
    if options.name is None:
        text = "\n".join(columns(list(SUMMARIES.items()), "< <"))
    else:
        text = (folder() / f"{options.name}.json").read_text(encoding="utf-8").removesuffix("\n")
    return 0 if tell(text) else 2
