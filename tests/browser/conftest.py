"""One JupyterLab and one Chromium at a time: playwright allows a single one."""

import pytest
from cells import COMPARE, RAISING, TWO_AXES, WHICH_LEVEL_BREAKS
from lab import CHROMIUM, Notebook, chromium, server, write_notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A notebook with four panels, cells 0 to 3, run in JupyterLab."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "panels.ipynb", WHICH_LEVEL_BREAKS, COMPARE, RAISING, TWO_AXES)
    with server(folder) as address, chromium() as browser:
        yield Notebook(browser, address.format("panels.ipynb"))
