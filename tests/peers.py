"""Other libraries, imported for comparison."""

from types import ModuleType

from regard.integrations.torchvision import let_torchvision_load as let_torchvision_load


def import_timm() -> ModuleType:
    let_torchvision_load()
    import timm

    return timm
