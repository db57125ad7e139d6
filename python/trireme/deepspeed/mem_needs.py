"""DeepSpeed's estimates of the memory that model states need, beside what a rank of this engine holds. Each prints a
table."""
from .._native import core


def estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5):
    """At stage 2, of a model that is there."""
    total, _ = core.size_of(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(total_params, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5):
    """At stage 2, of a number of parameters."""
    print(core.zero2_mem_needs(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1, additional_buffer_factor=1.5):
    """At stage 3, of a model that is there."""
    estimate_zero3_model_states_mem_needs_all_cold(*core.size_of(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(total_params, largest_layer_params, num_gpus_per_node=1, num_nodes=1,
                                                   additional_buffer_factor=1.5):
    """At stage 3, of numbers of parameters: all, and those of the largest module itself, without the modules in it."""
    print(core.zero3_mem_needs(total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor))
