"""The nested method against a float64 SVD of every explicitly centred prefix, for spectra easy and hard."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.spectral import SpectralOptions, prefix_functionals, prefix_spectral_sums
from verl.spectral.functions import SpectralFunction

NESTED = SpectralOptions(method="nested")
NAMES = ["effective_rank", "response_entropy"]
SHAPES = {"T < D": (96, 160), "T = D": (96, 96), "T > D": (150, 64), "T >> D": (260, 24)}


def spectrum_of(rows):
    """Singular values of the centred rows, and how ill-conditioned they are."""
    rows = rows.double()
    values = torch.linalg.svdvals(rows - rows.mean(0))[: max(0, min(len(rows) - 1, rows.shape[1]))]
    return values, float(values[0] / values[-1])


def entropy(weights):
    shares = weights / weights.sum()
    return float(torch.special.entr(shares).sum())


def with_spectrum(rows, width, singular_values):
    """A matrix with orthonormal singular vectors drawn at random."""
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    left, right = (
        torch.linalg.qr(torch.randn(size, min(rows, width), generator=generator, dtype=torch.float64)).Q
        for size in (rows, width)
    )
    return (left * singular_values) @ right.mT


def gaussian(rows, width, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows + width)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)


def indices(rows, width):
    return torch.arange(1, min(rows, width) + 1, dtype=torch.float64)


def massive_column(rows, width):
    hidden = gaussian(rows, width)
    hidden[:, 3] *= 1e3
    return hidden


def massive_row(rows, width, row):
    hidden = gaussian(rows, width)
    hidden[row] *= 1e3
    return hidden


SPECTRA = {
    **{
        f"power law {a}, at most 1e5": lambda t, d, a=a: with_spectrum(t, d, (indices(t, d) ** -a).clamp(min=1e-5))
        for a in (0.5, 1.0, 2.0, 3.0, 4.0)
    },
    **{
        f"condition {c:g}": lambda t, d, c=c: with_spectrum(
            t, d, torch.logspace(0, -math.log10(c), min(t, d), dtype=torch.float64)
        )
        for c in (1.0, 1e3, 1e5)
    },
    "one large, the rest 1e-5": lambda t, d: with_spectrum(t, d, torch.where(indices(t, d) > 1, 1e-5, 1.0)),
    "massive column": massive_column,
    "massive first token": lambda t, d: massive_row(t, d, 0),
    "massive token in the middle": lambda t, d: massive_row(t, d, t // 2),
    "large common offset": lambda t, d: gaussian(t, d) + 100 * gaussian(1, d),
    "drift": lambda t, d: gaussian(t, d).cumsum(0),
    "bfloat16": lambda t, d: (gaussian(t, d) / indices(d, d) + 3).bfloat16(),
    "float16": lambda t, d: (gaussian(t, d) / indices(d, d) + 3).half(),
    "float32": lambda t, d: (gaussian(t, d) / indices(d, d) + 3).float(),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", SPECTRA)
def test_every_prefix(name, shape):
    hidden = SPECTRA[name](*shape)
    length = shape[0]
    ranks = prefix_functionals(hidden[None], torch.tensor([length]), torch.arange(length + 1)[None], NAMES, NESTED)
    for k in sorted({3, 4, 7, 20, shape[1], shape[1] + 1, length // 2, length // 2 + 1, length - 1, length}):
        if k > length:
            continue
        values, condition = spectrum_of(hidden[:k])
        # A square matrix is worse conditioned than the whole: the bound beyond 1e5 is the documented one.
        tolerance = 1e-6 if condition <= 1.2e6 else 1e-5
        log_rank = entropy(values)
        assert float(ranks["effective_rank"][0, k]) == pytest.approx(math.exp(log_rank), rel=tolerance), k
        assert float(ranks["response_entropy"][0, k]) == pytest.approx(entropy(values**2), rel=1e-6), k
        if condition <= 1.2e6:
            # Near 0 an entropy is as exact as the squares of its small values, which depends on the BLAS.
            assert math.log(ranks["effective_rank"][0, k]) == pytest.approx(log_rank, rel=1e-6, abs=2e-8), k


@pytest.mark.parametrize(
    ("rows", "width", "decay", "bound"),
    [
        *((96, 160, f"condition {c:g}", 1e-6 if c == 1e6 else 1e-5) for c in (1e6, 1e7, 1e8, 1e10)),
        *((300, 320, f"power law {a:g}", 2e-4) for a in (3, 4)),
    ],
)
def test_degradation_of_spectra_beyond_the_range(rows, width, decay, bound):
    kind, number = decay.rsplit(maxsplit=1)
    spread = torch.logspace(0, -math.log10(float(number)), rows, dtype=torch.float64)
    hidden = with_spectrum(rows, width, spread if kind == "condition" else indices(rows, width) ** -float(number))
    result = prefix_functionals(hidden[None], torch.tensor([rows]), torch.tensor([[rows]]), NAMES, NESTED)
    exact, condition = spectrum_of(hidden)
    assert kind == "condition" or condition > 1e7
    assert float(result["effective_rank"]) == pytest.approx(math.exp(entropy(exact)), rel=bound)
    assert float(result["response_entropy"]) == pytest.approx(entropy(exact**2), rel=1e-6)


@pytest.mark.parametrize("function", [SpectralFunction(a, log) for a in (0.5, 1.0, 2.0, 3.0) for log in (False, True)])
def test_any_spectral_sum(function):
    hidden = 7 * gaussian(60, 40)
    sums = prefix_spectral_sums(hidden[None], torch.tensor([60]), torch.tensor([[60, 25, 2, 1]]), [function], NESTED)
    for column, k in enumerate((60, 25, 2)):
        values, _ = spectrum_of(hidden[:k])
        scale = float((values**function.power).sum())
        assert abs(float(sums[0, 0, column]) - float(function(values).sum())) <= 1e-5 * scale
    assert sums[0, 0, 3] == 0


def test_hidden_states_of_the_embedded_model(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = torch.randint(0, model.config.vocab_size, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layers = model(tokens, output_hidden_states=True).hidden_states
    for hidden in (layers[1], layers[-1], layers[-1].bfloat16()):
        prefixes = torch.arange(1, 91).repeat(2, 1)
        ranks = prefix_functionals(hidden, torch.tensor([90, 90]), prefixes, NAMES, NESTED)
        for response in range(2):
            for k in (3, 10, 33, 64, 65, 90):
                values, _ = spectrum_of(hidden[response, :k])
                actual = {name: float(ranks[name][response, k - 1]) for name in NAMES}
                assert actual["effective_rank"] == pytest.approx(math.exp(entropy(values)), rel=1e-6)
                assert actual["response_entropy"] == pytest.approx(entropy(values**2), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [*SHAPES.values(), (700, 300)], ids=str)
def test_a_gpu_gives_what_a_cpu_gives(shape):
    hidden = torch.stack([gaussian(*shape), massive_row(*shape, 5), massive_column(*shape), gaussian(*shape).cumsum(0)])
    lengths = torch.tensor([shape[0], shape[0] - 7, 3, 0])
    rows = torch.minimum(torch.arange(shape[0] + 1), lengths[:, None])
    for options in (NESTED, SpectralOptions("eigh"), SpectralOptions()):
        here, there = (
            prefix_functionals(hidden.to(device), lengths.to(device), rows.to(device), NAMES, options)
            for device in ("cpu", "cuda")
        )
        for name in NAMES:
            assert there[name].device.type == "cuda"
            torch.testing.assert_close(there[name].cpu(), here[name], rtol=1e-6, atol=1e-6)
