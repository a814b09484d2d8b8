"""The checker of prose finds what it is for, and leaves good English and code alone."""

import pytest

pytestmark = [
    pytest.mark.needs("proselint", "textblob"),
    # textblob leaves the file of its lexicon open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def found():
    import prose

    prose.register()
    return prose.found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("'vit' is no preset here.", "is not a ..."),
        ("A flag leaves the head away.", "leave out"),
        ("It is traced anew.", "again"),
        ("Each picture is resized.", "image"),
        ("A run goes on\nwith the next batch.", "continue"),
        ("The rows are whole. Not for windows of a row. They stay.", "no verb in: Not for windows"),
        ("It reads the the file.", "lexical illusion"),
    ],
)
def test_what_reads_badly_is_found_on_pages(found, text, said):
    lines = found("docs/page.md", f"# Page\n\n{text}\n")
    assert len(lines) == 1 and lines[0].startswith("docs/page.md:3:") and said in lines[0], lines


def test_comments_docstrings_and_messages_of_modules_are_checked(found):
    module = '"""Reads anew."""\n\nx = 1  # a picture of it\nraise ValueError(f"{x} is no file")\n'
    assert [line.split(":")[1] for line in found("src/a.py", module)] == ["1", "3", "4"]


def test_code_and_good_english_are_left_alone(found):
    page = (
        "# Pictures\n\nThere is no file in `pictures`. Each row has its own length. Nothing else\n"
        "changes, except for the last.\n\n```python\npictures = anew()\n```\n"
    )
    assert found("docs/page.md", page) == []
    assert found("src/a.py", "pictures = {'picture': anew}\n") == []
