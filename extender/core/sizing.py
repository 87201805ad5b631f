"""Propose the GPUs of a task from its command, from its description, and from similar pods.

The numbers for a description are those of dense language models; a measurement or an option of the
command takes precedence.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from extender.core.devices.gpu_models import OTHER, short_model
from extender.core.quantity import GIB

_BILLION: Final = 1e9

_CARD_BYTES: Final = 80 * GIB
USABLE: Final = 0.9
"""Part of a card that a task may fill; CUDA contexts and fragments take the rest."""
_ROOM: Final = 1.2
"""Proposed memory relative to the most that similar pods used, as in `idlegpu advise`. A percentile
would be too little for some of them: a pod without enough memory fails."""
_SHARE_BYTES: Final = 12 * GIB
"""For serving tasks up to this size, a share of a GPU is proposed."""
NODE_GPUS: Final = 8
"""Largest usual number of GPUs on a node."""


class Certainty(StrEnum):
    """Reliability of a proposal."""

    MEASURED = "measured"
    STATED = "stated"
    ESTIMATED = "estimated"
    GUESSED = "guessed"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A kind of task, recognized by words of its description.

    Attributes:
        words: beginnings of words, in lower case.
        bytes_each: memory for each parameter of the model.
        billions: parameters in billions, if the description has no number.
        serves: whether it waits for requests, so that pods can share a GPU.
    """

    name: str
    words: tuple[str, ...]
    bytes_each: float
    billions: float
    serves: bool = False


_TASKS: Final = (
    _Task(name="fine-tuning with 4-bit weights", words=("qlora",), bytes_each=1.0, billions=7),
    _Task(
        name="fine-tuning of adapters",
        words=("lora", "peft", "adapter"),
        bytes_each=2.8,
        billions=7,
    ),
    _Task(
        name="training",
        words=("fine-tun", "finetun", "fine tun", "train", "pretrain", "sft", "rlhf", "dpo"),
        bytes_each=18.0,
        billions=1,
    ),
    _Task(
        name="embedding",
        words=("embed", "rerank", "classif"),
        bytes_each=2.4,
        billions=0.6,
        serves=True,
    ),
    _Task(
        name="inference with 4-bit weights",
        words=(
            "awq",
            "gptq",
            "int4",
            "nf4",
            "fp4",
            "nvfp4",
            "mxfp4",
            "4-bit",
            "4 bit",
            "4bit",
            "gguf",
        ),
        bytes_each=0.8,
        billions=7,
        serves=True,
    ),
    _Task(
        name="inference with 8-bit weights",
        words=("fp8", "int8", "8-bit", "8 bit", "8bit"),
        bytes_each=1.4,
        billions=7,
        serves=True,
    ),
    _Task(
        name="inference",
        words=("infer", "serv", "chat", "generat", "vllm", "sglang", "tgi"),
        bytes_each=2.4,
        billions=7,
        serves=True,
    ),
)
"""Kinds of tasks; the first one whose words occur counts. Bytes for each parameter: mixed-precision
training with Adam needs 16 (2 for the weights, 2 for gradients, 12 for 32-bit copies and moments:
Rajbhandari et al., ZeRO, 2020) and room for activations; 16-bit inference 2, and a fifth for the
cache."""

_LARGE_BILLIONS: Final = 70.0
"""Size of "a large model" without a number."""

_SIZE: Final = re.compile(
    r"(?<![\d.,])(?:(\d{1,3})\s?x\s?)?(\d{1,6}(?:[.,]\d{1,4})?)"
    r"(?:\s{0,2}-?\s{0,2}(trillion|billion|bn|million)|[\s-]?(b|m))\b"
    r"(?!\s{0,2}-?\s{0,2}(?:tokens?|samples?|examples?|images?|rows?|steps?|documents?|records?)\b)",
    re.IGNORECASE,
)
"""Parameters of a model, of several experts in one (`8x7B`), but no amount of data (`5B tokens`).
Every repetition is bounded, so that the time grows only linearly with the text."""
_THOUSANDS: Final = re.compile(r",(?=\d{3}$)")
_LARGE: Final = re.compile(r"(?<![\w-])(?:large\b(?!-)|llm\b)", re.IGNORECASE)
"""Words for a large language model, but no part of a name such as `whisper-large-v3`."""
_NO_TASK: Final = re.compile(
    r"--(?:kv[-_]cache[-_]dtype[\s=]+\S+|lora[-_]modules[\s=]+\S+|enable[-_]lora|max[-_]lora)"
    r"|(?<![a-z])(?:(?:pre-?)?trained|fine[- ]?tuned|generat(?:ename|ion):|service(?:account|name))"
)
"""Options of vLLM and SGLang that state neither the type of the weights nor a training, words about
the model's past, and keys and paths of every manifest, in lower case."""
_IDS: Final = re.compile(
    r"\b(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{32,128})\b", re.IGNORECASE
)
"""UUIDs and digests, which may end in a number and `b`."""


def _option(names: str, kserve: str = "") -> re.Pattern[str]:
    """Return the pattern of an option, a key or a variable with a number.

    Args:
        names: pattern of its names.
        kserve: its key in KServe's `parallelism: {tensor: 4, pipeline: 2}`, "" without one.
    """
    keys = r"(parallelism:(?:\s+[a-z]{1,20}:(?:\s+\d{1,5})?){0,8}?\s+)"
    return re.compile(
        rf"""(?:(?<![\w-])|{keys})((?(1){kserve or "(?!)"}|(?:{names})))["']?(?:\s+value:)?"""
        r"""[\s=:]+["']?([1-9]\d{0,2})\b""",
        re.IGNORECASE,
    )


_PARALLEL: Final = _option(
    r"-{0,2}(?:(?:tensor[-_ ]?parallel|tp)[-_ ]?size|tp)|--num[-_]shard", "tensor"
)
"""Options and keys of vLLM, SGLang, TensorRT-LLM and TGI, and variables of these names in a
container (`name: TP_SIZE value: 4`)."""
_PIPELINE: Final = _option(r"-{0,2}(?:pipeline[-_]parallel|pp)[-_]size|--?pp")
"""Options that divide the model into stages, each with the GPUs of `_PARALLEL`."""
_PODS: Final = _option("pipelineParallelSize", "pipeline")
"""KServe's stages: a pod for each, with the GPUs of `_PARALLEL`."""
_COPIES: Final = _option(r"-{0,2}(?:data[-_]?parallel|dp)[-_]?size|--?dp")
"""Options that serve several copies of the model, each with the GPUs of one."""
_LOCAL_COPIES: Final = _option(r"-{0,2}data[-_]parallel[-_]size[-_]local|--?dpl", "dataLocal")
"""Options of vLLM for the copies on one node; `_COPIES` then counts those on all nodes."""
_SHARES_RANKS: Final = re.compile(r"(?<![\w-])--enable[-_]dp[-_]attention\b")
"""Option of SGLang: the copies share the GPUs of `_PARALLEL`."""
_LAUNCHED: Final = re.compile(
    r"(?<![\w-])--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)[\s=]+([1-9]\d{0,2})\b"
)
"""Options of torchrun, accelerate and deepspeed: the number of processes, each with one GPU."""
_WORDS: Final = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBERS: Final = {word: number for number, word in enumerate(_WORDS, 1)} | {
    word: 10 * number for number, word in enumerate(_TENS, 2)
}
_ANY_NUMBER: Final = "|".join(sorted(_NUMBERS, key=len, reverse=True))  # "sixteen" before "six"
_SIZE_IN_WORDS: Final = re.compile(
    rf"(?<![\w-])((?:(?:a|and|half|hundred|{_ANY_NUMBER})[\s-]){{1,8}})"
    r"(?=(?:trillion|billion|million)\b)",
    re.IGNORECASE,
)
_COUNTED: Final = re.compile(
    rf"(?<![\w.,-])(\d{{1,3}}|{_ANY_NUMBER})\s?[x\u00d7-]?\s?"
    r"(?:(?:nvidia|geforce|tesla)\s)?([a-z]+\d*[a-z]*)\b",
    re.IGNORECASE,
)
"""A number and the word after it, which may be a GPU or a model."""
_CARD_WORDS: Final = frozenset({"gpu", "card", "rtx", "gtx"})
_SCALES: Final[Mapping[str, float]] = {"trillion": 1e3, "billion": 1.0, "bn": 1.0, "b": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured use of similar pods.

    Attributes:
        by: their common property: owner, images or requests.
        pods: number of these pods.
        memory_bytes: the most that one of them used of a GPU.
    """

    by: str
    pods: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """GPUs for a task.

    Attributes:
        gpus: number of GPUs, or 1 if a share is enough.
        memory_bytes: memory needed on each GPU, None if unknown.
        models: models with that much memory, for `idlegpu.io/prefer-models`; () if any will do.
        is_share_enough: whether a share of a GPU is enough.
        certainty: reliability of the proposal.
        because: the reasons, in words.
    """

    gpus: int
    memory_bytes: int | None
    models: tuple[str, ...]
    is_share_enough: bool
    certainty: Certainty
    because: tuple[str, ...]


def propose(
    text: str, command: str = "", measured: Measured | None = None, *, gpus: int | None = None
) -> Proposal:
    """Propose the GPUs of a task.

    Args:
        text: description of the task, "" without one.
        command: its command, arguments and further configuration as one text.
        measured: measured use of similar pods, None if unknown.
        gpus: number of GPUs if it is given; None to propose it.

    Example:
        >>> found = propose("fine-tune a 7 billion model")
        >>> found.gpus, found.certainty.value, found.because[-1]
        (2, 'estimated', 'training of 7 billion parameters: 18 bytes for each, 118 GiB in all')
        >>> propose("", "vllm serve m --tensor-parallel-size 4").gpus
        4
    """
    described = f"{text} {command}"
    task = _task_of(described)
    billions, is_stated = _billions(text, command, task)
    because: list[str] = []
    total = math.ceil(billions * _BILLION * task.bytes_each) if task and billions else 0
    found, parts, reason = _stated_gpus(text, described)
    if gpus is None:
        gpus = found
        because += [reason] if reason else []
    is_counted = bool(because)
    stated, gpus = gpus, gpus or _gpus_for(total)
    each = math.ceil(total / (parts or gpus) / GIB) * GIB if total else None
    certainty = Certainty.ESTIMATED if is_stated else Certainty.GUESSED
    if measured is not None:
        each = math.ceil(measured.memory_bytes * _ROOM / GIB) * GIB
        gpus = stated or 1
        certainty = Certainty.MEASURED
        because.append(
            f"{measured.pods} pods with the same {measured.by} used up to "
            f"{measured.memory_bytes / GIB:.1f} GiB of a GPU; a fifth more is proposed"
        )
    elif task is None:
        certainty = Certainty.STATED if is_counted else Certainty.GUESSED
        alone = "" if is_counted else "one GPU, and "
        because.append(f"the task is unknown: {alone}no memory is reserved")
    else:
        because.append(_estimate_words(task, billions, total, is_stated=is_stated))
    models = _models(each)
    if each is not None and models is None:
        because.append(f"no usual card has {each // GIB} GiB: spread the task over more GPUs")
    if gpus > NODE_GPUS:
        because.append(f"more than {NODE_GPUS} GPUs: several pods, one for each node")
    return Proposal(
        gpus=gpus,
        memory_bytes=each,
        models=models or (),
        is_share_enough=gpus == 1
        and each is not None
        and each <= _SHARE_BYTES
        and (task is None or task.serves),
        certainty=certainty,
        because=tuple(because),
    )


def _stated_gpus(text: str, described: str) -> tuple[int | None, int | None, str]:
    """Return the number of GPUs that a task states, the number for one model copy, and the reason.

    (None, None, "") if it states none.

    Args:
        text: description of the task.
        described: the description followed by the command.
    """
    parts = [found for one in (_PARALLEL, _PIPELINE) if (found := one.search(described))]
    pods = _PODS.search(described)
    holders = math.prod(int(part[3]) for part in (*parts, pods) if part)
    copies = _LOCAL_COPIES.search(described) or _COPIES.search(described)
    if copies and not _SHARES_RANKS.search(described):
        parts.append(copies)
    if parts or pods:
        gpus = 1
        stated: list[re.Match[str]] = []
        for part in parts:
            # Beyond one node, stages and copies are on several nodes.
            if not stated or gpus * int(part[3]) <= NODE_GPUS:
                gpus *= int(part[3])
                stated.append(part)
        stated += [pods] if pods else []
        words = " ".join(described[part.start(2) : part.end()].strip() for part in stated)
        where = f" in each of {pods[3]} pods" if pods else ""
        number = f"{gpus} GPU{'s' * (gpus > 1)}{where}"
        return gpus, holders, f"the command spreads the model over {number}: {words}"
    if launched := _LAUNCHED.search(described):
        words = launched[0].strip()
        return int(launched[1]), None, f"the command starts a process for each GPU: {words}"
    for counted in _COUNTED.finditer(text):
        word = counted[2].lower()
        if any(map(_is_card, (word, word.removesuffix("s")))):
            gpus = _NUMBERS.get(counted[1].lower()) or int(counted[1])
            if gpus:
                return gpus, None, f"the description states the GPUs: {counted[0].strip()}"
    return None, None, ""


def _is_card(word: str) -> bool:
    return word in _CARD_WORDS or short_model(word) != OTHER


def _task_of(text: str) -> _Task | None:
    lowered = _NO_TASK.sub("", text.lower())
    return next(
        (
            task
            for task in _TASKS
            if any(re.search(rf"(?<![a-z]){re.escape(word)}", lowered) for word in task.words)
        ),
        None,
    )


def _billions(text: str, command: str, task: _Task | None) -> tuple[float, bool]:
    """Return the model's parameters in billions, and whether the task states them."""
    text = _SIZE_IN_WORDS.sub(_in_digits, text)
    described = f"{text} {_IDS.sub('', command)}"
    for stated in _SIZE.finditer(described):
        unit = (stated[3] or stated[4]).lower()
        # In a command `500m` is half a CPU or a time, unless a name ends in it.
        is_amount = unit == "m" and described[stated.start() - 1] not in "-_"
        if is_amount and stated.start() > len(text):
            continue
        number = float(_THOUSANDS.sub("", stated[2]).replace(",", "."))
        return int(stated[1] or 1) * number * _SCALES.get(unit, 1e-3), True
    if task is None:
        return 0.0, False
    # Embeddings come from small models, also from those that are called large.
    is_large = task.billions >= 1 and _LARGE.search(described)
    return (_LARGE_BILLIONS if is_large else task.billions), False


def _in_digits(written: re.Match[str]) -> str:
    """Return a number in words in digits; "a" alone is one."""
    number = 0.0
    for word in re.split(r"[\s-]", written[1].lower()):
        if word == "hundred":
            number = max(number, 1) * 100
        else:
            number += _NUMBERS.get(word, 0.5 if word == "half" else 0)
    return f"{number or 1:g} "


def _gpus_for(total: int) -> int:
    """Return the number of cards for that much memory, a power of two."""
    cards = max(math.ceil(total / (_CARD_BYTES * USABLE)), 1)
    return 1 << (cards - 1).bit_length()


def _estimate_words(task: _Task, billions: float, total: int, *, is_stated: bool) -> str:
    known = "" if is_stated else ", assumed because no size such as 7B is recognized"
    return (
        f"{task.name} of {billions:g} billion parameters{known}: {task.bytes_each:g} bytes for "
        f"each, {math.ceil(total / GIB)} GiB in all"
    )


def _models(each: int | None) -> tuple[str, ...] | None:
    """Return usual models with that much memory; () if nearly all have it, None if none has."""
    fitting = (models for gib, models in _MODELS if (each or 0) <= gib * GIB)
    return next(fitting, None)


_MODELS: Final[tuple[tuple[int, tuple[str, ...]], ...]] = (
    (15, ()),
    (22, ("L4", "A10", "L40S", "A100", "H100")),
    (44, ("L40S", "A40", "A100 80GB", "H100")),
    (79, ("A100 80GB", "H100", "H200")),
    (140, ("H200", "B200", "B300")),
    (178, ("B200", "B300")),
    (268, ("B300",)),
)
"""Usual models by the memory in GiB that each of them has at least."""


def texts_in(document: object) -> Iterator[str]:
    """Yield all texts and numbers of a decoded manifest with their keys, in order.

    Example:
        >>> list(texts_in({"args": ["--tp", "4"], "n": 1}))
        ['args:', '--tp', '4', 'n:', '1']
    """
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield f"{key}:"
            yield from texts_in(value)
    elif isinstance(document, Sequence) and not isinstance(document, str):
        for item in document:
            yield from texts_in(item)
    elif isinstance(document, str | int) and not isinstance(document, bool):
        yield str(document)
