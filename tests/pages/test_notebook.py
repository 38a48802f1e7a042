"""The notebook is committed without outputs, and runs from top to bottom in a fresh kernel."""

from pathlib import Path

import nbclient
import nbformat
import pytest

PATH = Path(__file__).parent.parent.parent / "examples" / "from_multisteps_to_accumulate.ipynb"


@pytest.fixture
def notebook():
    found = nbformat.read(PATH, as_version=nbformat.NO_CONVERT)
    nbformat.validate(found)
    return found


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_notebook_has_five_code_cells_with_text_before_each(notebook):
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds == ["markdown", *["markdown", "code"] * 5]


def test_code_has_at_most_80_columns(notebook):
    """The site cuts longer lines off."""
    for cell in code_cells(notebook):
        assert max(map(len, cell.source.splitlines())) <= 80, cell.id


def test_notebook_is_stripped(notebook):
    for cell in code_cells(notebook):
        assert (cell.outputs, cell.execution_count, cell.metadata) == ([], None, {}), cell.id
    assert set(notebook.metadata) == {"kernelspec"}


@pytest.mark.thorough
def test_notebook_runs_in_a_fresh_kernel_without_a_warning(notebook, tmp_path, monkeypatch):
    # In a new folder, and with the settings of a user who has none, so that it needs only the installed packages.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    # A cell with an error raises here. `python3` is the kernel of the environment that runs the tests.
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    printed = []
    for cell in code_cells(notebook):
        streams = [output for output in cell.outputs if output.output_type == "stream"]
        assert {stream.name for stream in streams} == {"stdout"}, cell.id
        printed.append("".join(stream.text for stream in streams))
    for text, claim in zip(
        printed,
        (
            "10 optimizer steps from 40 micro-batches",
            "10 optimizer steps\nlargest difference",
            "accumulate with weight=",
            "  MultiSteps:  0%\n  accumulate:  100%\nmicro-batches dropped: 1\n",
            "45 windows in 3 epochs, none left open",
        ),
        strict=True,
    ):
        assert claim in text
    assert "image/png" in code_cells(notebook)[-1].outputs[-1].data
