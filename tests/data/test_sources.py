import pytest

from lightning_hybridop.data.sources import DataError, field


def test_a_field_of_the_right_kind_is_returned() -> None:
    assert field({"label": 1}, "label", int, "rows.jsonl, line 2") == 1


@pytest.mark.parametrize(
    ("holder", "message"),
    [
        (["label"], "here: found ['label'], expected an object with the field 'label'."),
        ({"text": "a", "idx": 0}, "here: found the fields text, idx, expected 'label' among them."),
        ({}, "here: found the fields none, expected 'label' among them."),
        ({"label": "1"}, "here: found '1' in the field 'label', expected a whole number."),
        ({"label": True}, "here: found True in the field 'label', expected a whole number."),
        ({"label": "x" * 60}, f"here: found '{'x' * 36}... in the field 'label', expected a whole number."),
    ],
)
def test_anything_else_is_reported(holder: object, message: str) -> None:
    with pytest.raises(DataError) as raised:
        field(holder, "label", int, "here")
    assert str(raised.value) == message
