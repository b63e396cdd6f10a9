"""Certify the clients of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pfedbayes import runs
from pfedbayes.files.tensors import tensor_bytes
from pfedbayes.runs import saving
from pfedbayes.trust.certificate import Certificate, certify

CERTIFICATES, POSTERIORS = "certificate.json", "certified.safetensors"


def certify_run(folder: Path, device: str = "auto", trust_module: bool = False, **settings: Any) -> list[Certificate]:
    """Certify the clients of a run and write the certificates and the certified posteriors into its folder.

    trust_module: see `load`; settings: see `certify`.
    """
    federation = saving.load(folder, device=device, trust_module=trust_module)
    certificates = certify(federation, **settings)
    writer = runs.Writer(folder)
    try:
        texts = [certificate.as_json() for certificate in certificates]
        stacked = torch.stack([certificate.posterior for certificate in certificates])
        writer.write(POSTERIORS, tensor_bytes({"q": stacked}, {}))
        writer.write(CERTIFICATES, json.dumps(texts, indent=1) + "\n")
    finally:
        writer.close()
    return certificates
