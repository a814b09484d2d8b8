"""The documentation builds as a site, strictly, with all its pages and images."""

import re
from pathlib import Path

import pytest

from browser import look
from python_process import run_python

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    *(pytest.mark.across, pytest.mark.needs("mkdocs", "mkdocstrings", "nbconvert")),
    pytest.mark.nightly,
]


@pytest.fixture(scope="module")
def site(tmp_path_factory, exchange):
    folder = tmp_path_factory.mktemp("site")
    build = ("-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder)
    given = {"KMODELS_EXECUTED": str(exchange), "NO_MKDOCS_2_WARNING": "1"}
    done = run_python(*build, cwd=ROOT, seconds=600, **given)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return folder


def test_every_page_is_there(site):
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    wanted = {str(path.with_suffix(".html")) for path in sources} - {"README.html"}
    wanted |= {f"notebooks/{path.stem}.html" for path in (ROOT / "notebooks").glob("*.ipynb")}
    wanted |= {"index.html", "contents.html", "contributing.html", "changelog.html"}
    wanted |= {"benchmarks/index.html", "api/models.html", "api/training.html"}
    found = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert wanted <= found, wanted - found


def test_pictures_and_links_are_there(site):
    shown = 0
    for page in site.rglob("*.html"):
        text = page.read_text()
        for name in re.findall(r'<img[^>]* src="([^":]+)"', text):
            assert (page.parent / name).stat().st_size > 1000, (page.name, name)
            shown += 1
        for link in re.findall(r'href="([^"#?:]+)[#?"]', text):
            assert link.startswith("/") or (page.parent / link).exists(), (page.name, link)
    assert shown >= 1


def test_the_api_has_what_is_public(site):
    import kmodels

    for module in ("models", "training", "transforms", "distribution", "callbacks"):
        text = (site / "api" / f"{module}.html").read_text()
        public = getattr(kmodels, module)
        wanted = [name for name in public.__all__ if callable(getattr(public, name))]
        if module == "models":  # a page for each class, and an index
            missing = [name for name in wanted if f'href="models/{name}.html"' not in text]
        else:
            missing = [name for name in wanted if f".{name}" not in text]
        assert not missing, (module, missing)
    assert "Raises:" in (site / "api" / "distribution.html").read_text()


@pytest.mark.parametrize(
    ("name", "methods", "of_keras"),
    [
        (
            "GemmaCausalLM",
            "from_preset compile fit generate load_adapter save_to_preset",
            "summary",
        ),
        ("GemmaBackbone", "from_preset predict enable_lora intermediates", "get_layer"),
        ("ViTImageClassifier", "from_preset fit predict feature_model", "count_params"),
        ("GemmaTokenizer", "from_preset encode detokenize apply_chat_template", "get_weights"),
    ],
)
def test_a_class_shows_what_it_inherits(site, name, methods, of_keras):
    """Methods of kmodels' bases are shown with their arguments, those of Keras as links."""
    text = (site / "api" / "models" / f"{name}.html").read_text()
    shown = re.findall(rf'<h2 id="[\w.]+\.{name}\.(\w+)"', text)
    assert [method for method in shown if method in methods.split()] == methods.split()
    # What Keras calls by itself, and what PyTorch's modules have, would drown the rest.
    assert not {"build", "call", "train_step", "get_config", "zero_grad"} & {*shown}
    linked = re.findall(r'<a href="https://keras.io/api/[\w/]+"><code>(\w+)</code>', text)
    assert of_keras in linked


@pytest.mark.parametrize(
    ("page", "width"),
    [
        ("index", 390),
        ("tasks/many_gpus", 390),
        ("tasks/fine_tune_gemma", 1280),
        ("api/models/GemmaCausalLM", 390),
        ("notebooks/01_fine_tune_vit", 390),
        ("benchmarks/index", 1280),
    ],
)
def test_a_browser_shows_all_of_a_page(site, page, width, tmp_path):
    seen = look(site / f"{page}.html", width, tmp_path)
    assert seen["page"] <= width and seen["beyond"] == []
    assert seen["smallest"] >= 11
    assert all(natural > 100 for _, natural, _ in seen["pictures"]), seen["pictures"]
    if page.startswith("benchmarks"):
        assert seen["pictures"]
