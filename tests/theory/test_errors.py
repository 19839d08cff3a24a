"""Error messages for unknown names."""

from normfree.theory.errors import unknown_name


def test_of_very_many_names_some_are_listed() -> None:
    message = str(unknown_name("model", "x", [f"{i}" for i in range(1000)]))
    assert message.startswith("unknown model 'x'; expected one of: 0, 1, 2")
    assert message.endswith("38, 39, … (1000 in all)")


def test_close_names_are_suggested_alone_if_the_known_are_many() -> None:
    message = str(unknown_name("model", "resnet2", [f"resnet{i}" for i in range(20, 40)], where=" in 'a.toml'"))
    assert message.startswith("unknown model 'resnet2' in 'a.toml'; did you mean 'resnet")
    assert "expected one of" not in message
