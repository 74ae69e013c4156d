"""Help for importing peers."""

from regard.integrations.torchvision import let_torchvision_load as let_torchvision_load
