"""DeepSpeed's pipelines: topologies of ranks, schedules, layers."""
from ...missing import names_of
from .module import LayerSpec, PipelineModule, TiedLayerSpec
from .topology import ProcessTopology

__getattr__ = names_of(__name__)
