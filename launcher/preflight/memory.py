"""Memory on both nodes: the rank's weights and the margin, against MemAvailable."""

from __future__ import annotations

from launcher.facts.base import Missing, gib
from launcher.facts.memory import Memory
from launcher.findings import Finding, warning
from launcher.preflight.given import Given
from launcher.preflight.pair import Standing
from launcher.survey import Survey

TOPIC = "memory"
GIB = 1 << 30
RESIDENT = int(98.9 * GIB)  # a rank of the published checkpoint, measured after loading
FREE = 4 * GIB  # the driver takes its memory from MemFree: page cache does not come back for it
SWAPPED = 1 << 30  # bytes; a little of what nobody uses is always out
STALLED = 10.0  # percent of the last ten seconds that some process waited for memory


def needed(margin: float, weight_bytes_per_rank: int | None) -> int:
    """Bytes of MemAvailable a rank needs before it starts; the weights None or 0: not known."""
    weights = min(RESIDENT, weight_bytes_per_rank or RESIDENT)
    return weights + int(margin * GIB)


def crowded(found: Memory, need: int) -> bool:
    """Whether page cache stands where the driver will want to allocate."""
    return found.free < min(FREE, need) and found.cached > found.free


def per_rank(head: Survey) -> int | None:
    """Half of what the head's checkpoint weighs."""
    tree = head.model
    if tree is None or isinstance(tree, Missing) or not tree.exists:
        return None
    shards = tree.shards or tuple(n for n in tree.sizes if n.endswith(".safetensors"))
    total = tree.bytes_of(shards)
    return total // 2 or None


def memory(given: Given, pair: Standing, head: Survey, worker: Survey) -> list[Finding]:
    weights = per_rank(head)
    need = needed(given.margin, weights)
    if weights is None and not given.published:
        need = int(given.margin * GIB)  # what it weighs is known, and asked for, after the download
    findings = []
    for survey in (head, worker):
        found = survey.memory
        if isinstance(found, Missing):
            findings.append(
                Finding(
                    f"the memory of the {survey.name} is not known: {found.reason}",
                    f"{gib(need)} available on both nodes",
                    f"on the {survey.name}: cat /proc/meminfo",
                    topic=TOPIC,
                )
            )
            continue
        ours = pair.of(survey.name)
        if ours is not None and ours.running:
            continue  # our own rank holds it now, and is kept or ended first
        if found.available < need:
            findings.append(_short(survey, found.available, need, given.margin))
        elif crowded(found, need):
            findings.append(
                warning(
                    f"the {survey.name} has {gib(found.free)} free beside {gib(found.cached)} of "
                    "page cache",
                    "free memory for the GPU's driver, which cannot take it from the page cache",
                    "nothing where DSV41_DROP_PAGE_CACHE=1 and sudo asks for no password: it is"
                    f" dropped before the launch; else on the {survey.name}: sync; sudo sysctl"
                    " vm.drop_caches=1",
                    TOPIC,
                )
            )
        if (swapped := found.swap_total - found.swap_free) > SWAPPED:
            findings.append(
                warning(
                    f"the {survey.name} has {gib(swapped)} swapped out",
                    "a node that does not swap: on a GB10 that stalls the GPU, too",
                    f"on the {survey.name}: end what is large (ps aux --sort=-rss | head), then"
                    " sudo swapoff -a && sudo swapon -a",
                    TOPIC,
                )
            )
        if found.full is not None and found.full >= STALLED:
            findings.append(
                warning(
                    f"processes of the {survey.name} wait for memory {found.full:g} % of the time",
                    "a node that does not swap",
                    f"on the {survey.name}: ps aux --sort=-rss | head",
                    TOPIC,
                )
            )
    return findings


def _short(survey: Survey, available: int, need: int, margin: float) -> Finding:
    running = []
    if not isinstance(survey.docker, Missing):
        running = [each.name for each in survey.docker.containers if each.running]
    seen = f" (running containers: {', '.join(running)})" if running else ""
    return Finding(
        f"the {survey.name} has {gib(available)} of memory available{seen}",
        f"{gib(need)}: a rank's weights and {margin:g} GiB beyond (DSV41_BOOT_MARGIN_GIB)",
        f"end other programs on the {survey.name} (ps aux --sort=-rss | head shows which are "
        "large); after a stop the driver may take a minute to give memory back",
        topic=TOPIC,
    )
