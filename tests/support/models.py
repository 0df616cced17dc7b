"""Fixtures of small models, one for each kind of a table."""

import pytest


def fixtures_of(kinds, build):
    """(kind, model, make_model): tests that ask for `kind` or `model` run once for each of `kinds`; make_model is `build`."""

    @pytest.fixture(params=list(kinds))
    def kind(request):
        return request.param

    @pytest.fixture
    def model(kind):
        return build(kind)

    @pytest.fixture
    def make_model():
        return build

    return kind, model, make_model
