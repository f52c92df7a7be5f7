"""TorchTitan's launcher with our trainer, for releases whose configuration does not name one (0.2):

    torchrun --nproc-per-node 2 -m qeffect_lm.integrations.torchtitan.train --job.config_file CONFIG.toml \\
        --experimental.custom_import qeffect_lm.integrations.torchtitan.train_spec --model.name llama3_qeffect
"""

from __future__ import annotations

import inspect

from qeffect_lm.integrations.torchtitan.pipeline import required


def launch() -> None:
    """As ``python -m torchtitan.train``; the trainer of a release that asks for one is ours."""
    main = required("torchtitan.train").main
    if inspect.signature(main).parameters:
        main(required("qeffect_lm.integrations.torchtitan.trainer").Trainer)
    else:
        main()


if __name__ == "__main__":
    launch()
