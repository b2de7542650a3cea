"""The pages of the site that are made from the code: a hook of mkdocs.yml, so `make site` always has the newest."""

import sys
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))  # mkdocs loads this file by its path

from streamrl.metrics.names import markdown_page  # noqa: E402
from tests.contract import endpoint_fields, error_messages, protocol_session  # noqa: E402

PAGES: dict[str, Callable[[], str]] = {
    "endpoint_fields.md": endpoint_fields.page, "errors.md": error_messages.page, "metrics.md": markdown_page,
    "protocol_session.md": protocol_session.page,
}
"""Name in docs/, where it is not committed -> its text."""
FOUND_FIRST = {"rewards.md"}
"""Pages that the search puts above others that use their words more often."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; one that lies in docs/ since someone wrote it there by hand does not count."""
    for name, page in PAGES.items():
        if (written := files.get_file_from_path(name)) is not None:
            files.remove(written)
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Tell the search which pages count more."""
    if page.file.src_uri in FOUND_FIRST:
        page.meta["search"] = {"boost": 3}
