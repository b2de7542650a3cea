"""The page of error messages names every error of the code, and every one of them says what to do."""

from tests.contract.error_messages import REMEDIES, WHAT_TO_DO, error_classes, error_texts, page


def test_the_texts_of_the_code_are_found_and_stand_on_the_page():
    assert len(error_texts()) > 150 and page().count("\n| `") > 150
    assert "\n| `policy.model_path is not set: " in page()
    assert any(one.text.startswith("policy.model_path is not set: ") for one in error_texts())


def test_every_text_says_what_to_do_or_the_page_does():
    silent = [f"{one.path}: {one.text}" for one in error_texts() if not WHAT_TO_DO.search(one.text) and not one.remedy]
    assert not silent, "say what to do in the message, or in REMEDIES (error_messages.py):\n" + "\n".join(silent)


def test_every_remedy_belongs_to_a_text():
    assert [piece for piece in REMEDIES if not any(piece in one.text for one in error_texts())] == []


def test_every_class_of_error_is_on_the_page():
    assert [one.__name__ for one in error_classes() if f"| `{one.__name__}` |" not in page()] == []
