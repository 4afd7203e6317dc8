"""``p2ptrain checkpoint ls|verify|export``

Look after the checkpoints of a peer. A path is a checkpoint's folder, a folder of checkpoints, or a peer's run
directory; where one checkpoint is needed, the newest is taken. 'export' writes a Hugging Face folder that
from_pretrained loads; of a model that transformers does not know, such as a script's own, model.safetensors with the
tensors of its state_dict. Beside it is a model card (README.md): what the checkpoint, the manifest and the run
directory tell of the model, and how to load it. Files that are there already are replaced. Of a model in stages it
takes a folder with the run directories of a host of each stage, and the newest round that is complete: of which a host
heard that all stages had saved it, and with which digests.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from p2ptrain.cli.commands.peer import add_allow_path
from p2ptrain.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "verify", "export"), help="what to do")
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or a folder that holds checkpoints")
    parser.add_argument("output", type=Path, nargs="?", metavar="OUTPUT", help="export: the folder to write")
    parser.add_argument(
        "--manifest", type=Path, metavar="FILE", help="export: the signed manifest (default: manifest.bin nearby)"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="export: the pretrained model, if the swarm takes its tokenizer"
    )
    add_allow_path(parser)
    parser.add_argument(
        "--by-round", action="store_true",
        help="export: join stages of one round though no host heard that all had saved it (the run ended before)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    if (arguments.action == "export") != (arguments.output is not None):
        raise UsageError("'export' takes PATH and OUTPUT, the others PATH alone; see 'p2ptrain checkpoint --help'")
    from p2ptrain.cli.checkpoints import export, find_checkpoints, find_stage_checkpoints, list_all, verify
    from p2ptrain.cli.stage_export import export_stages

    paths = find_checkpoints(arguments.path)
    if arguments.action == "export":
        from p2ptrain.monitor.card import write_card

        of_stages = find_stage_checkpoints(arguments.path)
        exported = export_stages(of_stages, arguments) if of_stages else export(paths[-1], arguments)
        run_dirs = {arguments.path, *arguments.path.glob("*/"), paths[-1].absolute().parents[1]}
        write_card(arguments.output, *exported, of_stages or paths, sorted(run_dirs))
    elif arguments.action == "verify":
        verify(paths)
    else:
        list_all(paths)
    return 0
