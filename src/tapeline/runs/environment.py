"""The environment of a run: interpreter, packages, libraries, driver, container, variables.

Reads metadata and files; imports nothing heavy. What torch knows is asked of torch only where the
process has it already. Variables count by an allow-list of prefixes, and never if they look like
keys.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tapeline.runs.secrecy import looks_secret, redacted_command, without_credentials

_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "NUMBA_", "DNNL_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "PYTHON"),
    *("TAPELINE_", "SLURM_JOB", "LD_PRELOAD", "MALLOC_", "TZ", "LC_", "LANG"),
)
# Where a container's image stands: our own convention first, then what runtimes set themselves.
_IMAGE_VARIABLES = ("TAPELINE_IMAGE", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


def environment() -> dict[str, Any]:
    """What this process runs in, as JSON can hold it."""
    packages, origins = installed()
    return {
        "python": platform.python_version(),
        "implementation": f"{platform.python_implementation()}, {platform.python_compiler()}",
        "system": {
            "host": socket.gethostname(),
            "kernel": f"{platform.system()} {platform.release()}",
            "distribution": _distribution(),
            "libc": " ".join(platform.libc_ver()) or None,
        },
        "packages": packages,
        "origins": origins,
        "torch": _torch(),
        "blas": _blas(),
        "driver": _driver(Path("/proc/driver/nvidia/version")),
        "container": container(os.environ),
        "variables": variables(os.environ),
        "command": redacted_command(sys.argv),
    }


def installed() -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Every installed package with its version; and where from, if not from an index.

    Names and versions are read off folder names: to open each file of metadata takes 0.15 s.
    """
    packages: dict[str, str] = {}
    origins: dict[str, dict[str, Any]] = {}
    for entry in sys.path:
        folder = Path(entry or ".")
        if not folder.is_dir():
            continue
        for info in sorted(folder.glob("*.dist-info")):
            name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
            name = re.sub(r"[-_.]+", "-", name).lower()
            if not name or name in packages:
                continue
            packages[name] = version
            if (direct := info / "direct_url.json").exists():
                origins[name] = _origin(json.loads(direct.read_text()))
    return dict(sorted(packages.items())), origins


def _origin(direct: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "url": without_credentials(str(direct.get("url", ""))),
        "editable": bool(direct.get("dir_info", {}).get("editable")),
        "commit": direct.get("vcs_info", {}).get("commit_id"),
    }


def editable_folders(origins: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """The folders of editable installs, by package."""
    return {
        name: Path(str(origin["url"]).removeprefix("file://"))
        for name, origin in origins.items()
        if origin["editable"] and str(origin["url"]).startswith("file://")
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that can change numbers or speed; those named like keys aren't read."""
    return {
        name: without_credentials(environ[name])
        for name in sorted(environ)
        if name.startswith(_PREFIXES) and not looks_secret(name)
    }


def container(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, Any] | None:
    """What container this is, with its image's digest where the runtime tells it; None: in none.

    Docker and Kubernetes tell a process nothing of its image: set TAPELINE_IMAGE to its digest.
    """
    image = next((environ[name] for name in _IMAGE_VARIABLES if environ.get(name)), None)
    digest = image if image and "sha256:" in image else None
    podman = root / "run/.containerenv"
    if podman.exists():
        said = dict(re.findall(r'^(\w+)="(.*)"$', podman.read_text(), re.MULTILINE))
        image, digest = image or said.get("image"), digest or said.get("imageid")
    inside = (
        podman.exists() or (root / ".dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in environ
    )
    if not (image or inside):
        return None
    return {"image": image and without_credentials(image), "digest": digest}


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _driver(path: Path) -> str | None:
    """The version of the accelerator's driver."""
    try:
        match = re.search(r"Kernel Module\D*(\d+(\.\d+)+)", path.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _blas() -> str | None:
    """What NumPy multiplies matrices with."""
    found = np.show_config(mode="dicts")
    blas = (found or {}).get("Build Dependencies", {}).get("blas", {})
    return f"{blas['name']} {blas.get('version', '')}".strip() if blas.get("name") else None


def _torch() -> dict[str, Any] | None:
    """How torch was built, and what it sees; None while the process hasn't imported it."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    on_device = torch.cuda.is_available()
    return {
        "version": str(torch.__version__),
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "build": [
            line.strip(" -") for line in torch.__config__.show().splitlines() if line.strip()
        ],
        "threads": torch.get_num_threads(),
        "threads_between_operations": torch.get_num_interop_threads(),
        "devices": [
            {
                "name": device.name,
                "bytes": device.total_memory,
                "capability": [device.major, device.minor],
            }
            for device in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
        if on_device
        else [],
    }
