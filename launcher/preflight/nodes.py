"""What each node must be able to do, and where the two should not differ."""

from __future__ import annotations

import re
import shlex

from launcher.facts.base import Missing
from launcher.facts.docker import Docker, Image
from launcher.findings import Finding, warning
from launcher.image.identity import ARCHITECTURES, first_difference, fits, same
from launcher.preflight.given import Given
from launcher.survey import Survey

CLOCK = 5.0  # seconds


def abilities(survey: Survey) -> list[Finding]:
    """Docker, the GPU and the devices of one node."""
    return [*_docker(survey), *_gpu(survey), *_devices(survey), *_kernel(survey)]


def _docker(survey: Survey) -> list[Finding]:
    found = survey.docker
    who = survey.name
    if isinstance(found, Missing):
        mend = f"on the {who}: sudo systemctl start docker, then docker info"
        if "ermission denied" in found.reason:
            mend = f"on the {who}: sudo usermod -aG docker $USER, then log in anew"
        identity = survey.identity
        if not isinstance(identity, Missing) and "docker" not in identity.tools:
            mend = f"install Docker on the {who}: sudo apt install docker.io, or Docker's own"
        return [
            Finding(
                f"Docker of the {who} does not answer: {found.reason}",
                "a Docker daemon that this user may use, on both nodes",
                mend,
                topic="docker",
            )
        ]
    identity = survey.identity
    hooked = not isinstance(identity, Missing) and any(
        tool in identity.tools for tool in ("nvidia-ctk", "nvidia-container-runtime-hook")
    )
    if "nvidia" in found.runtimes or hooked:
        return []
    return [
        Finding(
            f"Docker of the {who} has no NVIDIA runtime, and its tools are not on the PATH",
            "a Docker that gives containers the GPU",
            f"on the {who}: sudo apt install nvidia-container-toolkit && sudo nvidia-ctk runtime "
            "configure --runtime=docker && sudo systemctl restart docker",
            topic="docker",
        )
    ]


def _gpu(survey: Survey) -> list[Finding]:
    who = survey.name
    if isinstance(survey.gpus, Missing):
        return [
            Finding(
                f"the GPU of the {who} does not answer: {survey.gpus.reason}",
                "nvidia-smi that lists the GPU",
                f"on the {who}: nvidia-smi; sudo dmesg | grep NVRM; after a driver update: reboot",
                topic="gpu",
            )
        ]
    if any("GB10" in gpu.name for gpu in survey.gpus):
        return []
    names = ", ".join(gpu.name for gpu in survey.gpus)
    return [
        warning(f"the {who} has {names}", "a GB10, for which this is made", "none is needed", "gpu")
    ]


def _devices(survey: Survey) -> list[Finding]:
    who = survey.name
    if isinstance(survey.devices, Missing):
        return []
    findings = []
    if not any(name.startswith("/dev/infiniband/uverbs") for name in survey.devices):
        findings.append(
            Finding(
                f"the {who} has no /dev/infiniband/uverbs device",
                "RDMA for user programs: NCCL would fall back to TCP, at a third of the speed",
                f"on the {who}: sudo modprobe ib_uverbs; ls -l /dev/infiniband",
                topic="devices",
            )
        )
    if "/dev/nvidiactl" not in survey.devices:
        findings.append(
            Finding(
                f"the {who} has no /dev/nvidiactl",
                "the GPU's device nodes, which the container is given by name",
                f"on the {who}: sudo nvidia-modprobe -u -c 0; ls -l /dev/nvidia*",
                topic="devices",
            )
        )
    return findings


def _kernel(survey: Survey) -> list[Finding]:
    identity = survey.identity
    if isinstance(identity, Missing):
        return []
    # Registering memory for RDMA fails there (ibv_reg_mr: ENOMEM), and the driver reports
    # NV_ERR_NO_MEMORY soon after NCCL has met.
    if re.match(r"7\.0\.0-1019\b", identity.kernel) and "kho=off" not in identity.cmdline.split():
        return [
            warning(
                f"the {survey.name} runs kernel {identity.kernel}, with which RDMA memory "
                "registration is known to fail",
                "another kernel, or this one with kho=off",
                f"on the {survey.name}: add kho=off to GRUB_CMDLINE_LINUX in /etc/default/grub, "
                "sudo update-grub, reboot; or boot the kernel before",
                "kernel",
            )
        ]
    return []


def parity(head: Survey, worker: Survey) -> list[Finding]:
    """Where two nodes that differ work less surely; nothing here stops a start."""
    findings = []
    for what, one, other, how in (
        ("the NVIDIA driver", _driver(head), _driver(worker), "sudo apt full-upgrade, then reboot"),
        ("the kernel", _kernel_of(head), _kernel_of(worker), "sudo apt full-upgrade, then reboot"),
        ("Docker", _version(head.docker), _version(worker.docker), "sudo apt full-upgrade"),
        ("the firmware of the HCAs", _firmware(head), _firmware(worker), "sudo fwupdmgr update"),
    ):
        if one and other and one != other:
            findings.append(
                warning(
                    f"{what} is {one} on the head and {other} on the worker",
                    "equal versions on both nodes",
                    f"on the older one: {how}",
                    "parity",
                )
            )
    return [*findings, *_clock(head, worker)]


def _clock(head: Survey, worker: Survey) -> list[Finding]:
    if isinstance(head.clock, Missing) or isinstance(worker.clock, Missing):
        return []
    # Each was read at some moment between the question and the answer.
    low = (worker.clock - worker.asked[1]) - (head.clock - head.asked[0])
    high = (worker.clock - worker.asked[0]) - (head.clock - head.asked[1])
    if low > CLOCK or high < -CLOCK:
        return [
            warning(
                f"the worker's clock is {abs((low + high) / 2):.0f} s "
                f"{'ahead of' if low > 0 else 'behind'} the head's",
                f"clocks within {CLOCK:g} s: the logs of both nodes are compared",
                "on both: timedatectl set-ntp true, then timedatectl",
                "clock",
            )
        ]
    return []


def image(given: Given, head: Survey, worker: Survey) -> list[Finding]:
    """The image, where no later step may bring it: there, of the node's architecture, and layer by
    layer the same on both nodes."""
    findings: list[Finding] = []
    images: list[Image] = []
    for survey in (head, worker):
        if not isinstance(survey.docker, Docker):
            continue
        found = survey.docker.image
        if isinstance(found, Image):
            images.append(found)
        if survey.name in given.image_needed:
            findings += _its_image(given, survey, found)
    if len(images) == 2 and "worker" in given.image_needed and not same(*images):
        findings.append(
            Finding(
                f"the image {given.image} differs between the nodes: "
                f"{first_difference(images[0].layers, images[1].layers)}",
                "the same layers in the same order on both nodes",
                f"{_how(given, 'worker')}; or docker save on one, docker load on the other",
                topic="image",
            )
        )
    return findings


def _its_image(given: Given, survey: Survey, found: Image | Missing | None) -> list[Finding]:
    who = survey.name
    flags = given.image_flags.get(who)
    if not isinstance(found, Image):
        why = f" ({found.reason})" if isinstance(found, Missing) else ""
        return [
            Finding(
                f"the {who} has no image {given.image}{why}",
                f"it there, as {flags} keep it from being brought" if flags else "it there",
                f"{_how(given, who)}; or docker save, docker load",
                topic="image",
            )
        ]
    machine = "" if isinstance(survey.identity, Missing) else survey.identity.machine
    wanted = ARCHITECTURES.get(machine, "")
    if fits(found, "", machine):
        return []
    return [
        Finding(
            f"the image on the {who} is for {found.architecture}",
            f"{found.os or 'linux'}/{wanted}, for a {machine}",
            f"{_how(given, who)}; or on the {who}: docker pull --platform linux/{wanted} "
            f"{shlex.quote(given.image)}",
            topic="image",
        )
    ]


def _how(given: Given, who: str) -> str:
    """What brings the image there."""
    flags = given.image_flags.get(who)
    if not flags:
        return "./start.sh brings it first (built or pulled, and copied to the worker)"
    return f"start without {flags}: the image is then built or pulled, and copied to the worker"


def _driver(survey: Survey) -> str:
    return "" if isinstance(survey.gpus, Missing) else survey.gpus[0].driver


def _kernel_of(survey: Survey) -> str:
    return "" if isinstance(survey.identity, Missing) else survey.identity.kernel


def _version(docker: Docker | Missing) -> str:
    return "" if isinstance(docker, Missing) else docker.version


def _firmware(survey: Survey) -> str:
    if isinstance(survey.roce, Missing):
        return ""
    return ", ".join(sorted({device.firmware for device in survey.roce if device.firmware}))
