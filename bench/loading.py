"""Help for importing peers."""

from regard.conform.loading import let_torchvision_load as let_torchvision_load
