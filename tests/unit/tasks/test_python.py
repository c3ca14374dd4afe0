"""Functions of the user's."""

import pytest

from stalewise.errors import TaskError
from stalewise.tasks import make_verifier
from stalewise.tasks.verifiers.python import PythonVerifier
from verifying import score


@pytest.mark.parametrize("function", ["judge", ":judge", "module:", "module:two words"])
def test_function_of_the_wrong_form(function: str) -> None:
    with pytest.raises(TaskError, match="must look like 'module:function'"):
        make_verifier("python", function=function)


def test_function_that_cannot_be_loaded(judges: str) -> None:
    with pytest.raises(TaskError, match="there is no module 'no_such_module'"):
        make_verifier("python", function="no_such_module:judge")
    module = judges.partition(":")[0]
    with pytest.raises(TaskError, match=f"cannot load {module}:jugde: AttributeError"):
        score(make_verifier("python", function=f"{module}:jugde"), "8")
    with pytest.raises(TaskError, match=f"cannot load {module}:not_callable: TypeError"):
        score(make_verifier("python", function=f"{module}:not_callable"), "8")


def test_a_module_that_is_not_there_is_refused_before_any_process_starts() -> None:
    with pytest.raises(TaskError, match="there is no module 'no_such_module' on the Python path"):
        PythonVerifier("no_such_module:judge")
