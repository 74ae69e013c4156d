"""Which tests are slow: full trainings, and most of many similar cases. Every other function runs in `make test`."""

from collections import Counter
from collections.abc import Iterable

# functions that are slow as a whole, at most 40; conftest.py marks them, `make slow` runs them
SLOW: set[str] = {
    "tests/cli/test_train_command.py::test_several_processes_print_metrics_once",
    "tests/explorer/test_load.py::test_fifty_clients_get_answers_and_memory_stays",
    "tests/lab/test_attention.py::test_the_full_setup_gives_the_shares_to_four_digits",
    "tests/lab/test_every_claim.py::test_the_full_run_supports_the_claim_and_refutes_its_wrong_answers",
    "tests/recipes/test_birthplaces.py::test_the_built_in_run_reaches_its_accuracy_and_abstains_on_unknown_people",
    "tests/recipes/test_language.py::test_the_built_in_bert_is_better_than_chance_on_every_objective",
    "tests/recipes/test_language.py::test_the_built_in_gpt_is_far_better_than_trigrams",
    "tests/recipes/test_speech.py::test_the_built_in_run_reaches_its_error_rate_and_outputs_nothing_in_silence",
    "tests/recipes/test_translation.py::test_the_built_in_run_translates_numbers_that_are_not_in_training",
    "tests/recipes/test_vision.py::test_the_other_architectures_reach_the_accuracy",
    "tests/recipes/test_vision.py::test_the_built_in_run_reaches_its_accuracy",
}

# cases of a function that run in `make test`, spread over the values of its parameters; `make slow` runs the others
QUICK_CASES: dict[str, int] = {
    # every fact has a mutant and a correct attention in test_every_fact_has_a_mutant..., which runs whole
    "tests/conform/test_mutants.py::test_a_fault_is_reported": 30,
    "tests/conform/test_correct_attentions.py::test_a_library": 15,
    "tests/core/test_truth.py::test_every_kernel_under_every_mask": 43,
    "tests/core/test_truth.py::test_every_kernel_at_every_size": 38,
    "tests/core/test_truth.py": 40,
    "tests/core/test_properties.py": 122,
    # these compile for seconds
    "tests/core/test_nan.py::test_a_visible_score_of_nan_or_plus_infinity_reaches_no_gradient": 12,
    "tests/core/test_nan.py::test_nan_in_a_short_row_is_not_taken_for_a_hidden_one": 8,
    "tests/core/test_transforms.py::TestCompiled::test_masks_with_data_and_score_terms": 10,
    "tests/core/test_transforms.py::TestCompiled::test_masks_by_position": 6,
    "tests/core/test_transforms.py::TestCompiled::test_dynamic_sizes": 12,
    "tests/core/test_transforms.py": 16,
    "tests/core/test_flex.py::test_compiled_code_runs_it_with_gradients_at_all_lengths": 12,
    "tests/core/test_flex.py": 20,
    "tests/core/test_gradients.py::test_keys_that_share_a_component_lose_no_digits": 14,
    "tests/core/test_magnitude.py::test_gradients_of_compiled_code_are_as_exact": 8,
    "tests/core/test_magnitude.py": 30,
    "tests/core/": 60,
    "tests/models/test_presets.py::test_every_preset_has_the_published_number_of_parameters": 60,
    "tests/models/": 10,
    "tests/integrations/test_huggingface_families.py": 9,
    "tests/integrations/test_huggingface_compiled.py": 1,
    "tests/see/test_survey.py": 3,
    "tests/see/": 16,
    "tests/train/": 10,
    "tests/data/": 30,
    "tests/recipes/": 12,
    "tests/cli/": 25,
    "tests/lab/test_every_claim.py": 1000,
    "tests/lab/": 25,
}


def select_quick(names: list[str]) -> set[str]:
    """The cases that `make test` runs: all of most functions, some of those with many similar cases."""
    functions: dict[str, list[str]] = {}
    for name in names:
        if (function := name.partition("[")[0]) not in SLOW:
            functions.setdefault(function, []).append(name)
    quick: set[str] = set()
    for function, cases in functions.items():
        most = next((count for start, count in QUICK_CASES.items() if function.startswith(start)), len(cases))
        quick.update(spread(cases, min(most, len(cases))))
    return quick


def spread(cases: list[str], count: int) -> list[str]:
    """Return `count` of the cases, in which each value of a parameter occurs about equally often.

    Every n-th case could always have the same value of the parameter that varies fastest, such as the kernel.
    """
    if count == len(cases):
        return cases
    times: Counter[tuple[int, str]] = Counter()
    # neighbours are similar: cases with equally rare values are taken far apart, from the first on
    left = [cases[number] for number in sorted(range(len(cases)), key=lambda number: number * 0.618034 % 1)]
    chosen = []
    for _ in range(count):
        chosen.append(min(left, key=lambda case: sum(times[value] for value in values(case))))
        left.remove(chosen[-1])
        times.update(values(chosen[-1]))
    return chosen


def values(case: str) -> list[tuple[int, str]]:
    """Return the parameter values of a case, read from its id, each with its index."""
    return list(enumerate(case.partition("[")[2].removesuffix("]").split("-")))


def find_without_quick_case(cases: Iterable[tuple[str, bool]]) -> list[str]:
    """Functions of which every case is slow, and which are not listed; cases are (node id, is slow)."""
    quick: dict[str, bool] = {}
    for name, slow in cases:
        function = name.partition("[")[0]
        quick[function] = quick.get(function, False) or not slow
    return sorted(function for function, found in quick.items() if not found and function not in SLOW)
