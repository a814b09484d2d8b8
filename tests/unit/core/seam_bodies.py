"""For the type checker: the files of each seam satisfy its Protocol. Never imported.

Written by `python tests/seams.py`; `test_seams.py` says when it has to be.
"""

from kmodels.checkpoint import orbax_jax as checkpoint_orbax_jax
from kmodels.checkpoint import state_jax as checkpoint_state_jax
from kmodels.checkpoint import state_torch as checkpoint_state_torch
from kmodels.checkpoint.orbax import OrbaxBackend
from kmodels.checkpoint.state import StateBackend
from kmodels.core import processes_jax as core_processes_jax
from kmodels.core import processes_torch as core_processes_torch
from kmodels.core import replicas_tensorflow as core_replicas_tensorflow
from kmodels.core import runtime_jax as core_runtime_jax
from kmodels.core import runtime_tensorflow as core_runtime_tensorflow
from kmodels.core import runtime_torch as core_runtime_torch
from kmodels.core import seeds_torch as core_seeds_torch
from kmodels.core.processes import ProcessesBackend
from kmodels.core.runtime import RuntimeBackend
from kmodels.core.seeds import SeedsBackend
from kmodels.data.pipeline import device_put_jax as data_pipeline_device_put_jax
from kmodels.data.pipeline import device_put_tensorflow as data_pipeline_device_put_tensorflow
from kmodels.data.pipeline import device_put_torch as data_pipeline_device_put_torch
from kmodels.data.pipeline.device_put import DevicePutBackend
from kmodels.distribution.engines import engine_jax as distribution_engines_engine_jax
from kmodels.distribution.engines import engine_tensorflow as distribution_engines_engine_tensorflow
from kmodels.distribution.engines import engine_torch as distribution_engines_engine_torch
from kmodels.distribution.engines.engine import EngineBackend
from kmodels.distribution.ray import workers_jax as distribution_ray_workers_jax
from kmodels.distribution.ray import workers_tensorflow as distribution_ray_workers_tensorflow
from kmodels.distribution.ray import workers_torch as distribution_ray_workers_torch
from kmodels.distribution.ray.workers import WorkersBackend
from kmodels.generation import loop_jax as generation_loop_jax
from kmodels.generation import loop_tensorflow as generation_loop_tensorflow
from kmodels.generation import loop_torch as generation_loop_torch
from kmodels.generation.generate import LoopBackend
from kmodels.layers import block_compile_torch as layers_block_compile_torch
from kmodels.layers import direct_calls_torch as layers_direct_calls_torch
from kmodels.layers import remat_jax as layers_remat_jax
from kmodels.layers import remat_tensorflow as layers_remat_tensorflow
from kmodels.layers import remat_torch as layers_remat_torch
from kmodels.layers.block_compile import BlockCompileBackend
from kmodels.layers.direct_calls import DirectCalls
from kmodels.layers.remat import RematBackend
from kmodels.models.blocks import order_jax as models_blocks_order_jax
from kmodels.models.blocks import order_torch as models_blocks_order_torch
from kmodels.models.blocks.inputs import OrderBackend
from kmodels.ops import _recompute_jax as ops__recompute_jax
from kmodels.ops import _recompute_tensorflow as ops__recompute_tensorflow
from kmodels.ops import _recompute_torch as ops__recompute_torch
from kmodels.ops._recompute import RecomputeBackend
from kmodels.tools import doctor_jax as tools_doctor_jax
from kmodels.tools import doctor_tensorflow as tools_doctor_tensorflow
from kmodels.tools import doctor_torch as tools_doctor_torch
from kmodels.tools.compare_backends import openxla_torch as tools_compare_backends_openxla_torch
from kmodels.tools.compare_backends.work import OpenXLABackend
from kmodels.tools.convert import GraphsBackend
from kmodels.tools.convert import graphs_jax as tools_convert_graphs_jax
from kmodels.tools.convert import graphs_tensorflow as tools_convert_graphs_tensorflow
from kmodels.tools.convert import graphs_torch as tools_convert_graphs_torch
from kmodels.tools.doctor import DoctorBackend
from kmodels.tools.plan import facts_jax as tools_plan_facts_jax
from kmodels.tools.plan import facts_tensorflow as tools_plan_facts_tensorflow
from kmodels.tools.plan import facts_torch as tools_plan_facts_torch
from kmodels.tools.plan.estimate import FactsBackend
from kmodels.training import optax_jax as training_optax_jax
from kmodels.training import optimizers_tensorflow as training_optimizers_tensorflow
from kmodels.training import optimizers_torch as training_optimizers_torch
from kmodels.training import set_criterion_torch as training_set_criterion_torch
from kmodels.training import step_jax as training_step_jax
from kmodels.training import step_tensorflow as training_step_tensorflow
from kmodels.training import step_torch as training_step_torch
from kmodels.training import train_step_jax as training_train_step_jax
from kmodels.training import train_step_tensorflow as training_train_step_tensorflow
from kmodels.training import train_step_torch as training_train_step_torch
from kmodels.training.loop import ReplicasBackend, StepBackend
from kmodels.training.optax import OptaxBackend
from kmodels.training.optimizers import OptimizersBackend
from kmodels.training.set_criterion import AssignmentBackend
from kmodels.training.train_step import TrainStepBackend
from kmodels.transforms import engine_jax as transforms_engine_jax
from kmodels.transforms import engine_tensorflow as transforms_engine_tensorflow
from kmodels.transforms import engine_torch as transforms_engine_torch
from kmodels.transforms.engine import TransformsBackend
from kmodels.weights import host_jax as weights_host_jax
from kmodels.weights import host_tensorflow as weights_host_tensorflow
from kmodels.weights import host_torch as weights_host_torch
from kmodels.weights.gather import HostBackend

_checkpoint_orbax_jax: OrbaxBackend = checkpoint_orbax_jax
_checkpoint_state_jax: StateBackend = checkpoint_state_jax
_checkpoint_state_torch: StateBackend = checkpoint_state_torch
_core_processes_jax: ProcessesBackend = core_processes_jax
_core_processes_torch: ProcessesBackend = core_processes_torch
_core_replicas_tensorflow: ReplicasBackend = core_replicas_tensorflow
_core_runtime_jax: RuntimeBackend = core_runtime_jax
_core_runtime_torch: RuntimeBackend = core_runtime_torch
_core_runtime_tensorflow: RuntimeBackend = core_runtime_tensorflow
_core_seeds_torch: SeedsBackend = core_seeds_torch
_data_pipeline_device_put_jax: DevicePutBackend = data_pipeline_device_put_jax
_data_pipeline_device_put_torch: DevicePutBackend = data_pipeline_device_put_torch
_data_pipeline_device_put_tensorflow: DevicePutBackend = data_pipeline_device_put_tensorflow
_distribution_engines_engine_jax: EngineBackend = distribution_engines_engine_jax
_distribution_engines_engine_torch: EngineBackend = distribution_engines_engine_torch
_distribution_engines_engine_tensorflow: EngineBackend = distribution_engines_engine_tensorflow
_distribution_ray_workers_jax: WorkersBackend = distribution_ray_workers_jax
_distribution_ray_workers_torch: WorkersBackend = distribution_ray_workers_torch
_distribution_ray_workers_tensorflow: WorkersBackend = distribution_ray_workers_tensorflow
_generation_loop_jax: LoopBackend = generation_loop_jax
_generation_loop_torch: LoopBackend = generation_loop_torch
_generation_loop_tensorflow: LoopBackend = generation_loop_tensorflow
_layers_block_compile_torch: BlockCompileBackend = layers_block_compile_torch
_layers_direct_calls_torch: DirectCalls = layers_direct_calls_torch
_layers_remat_jax: RematBackend = layers_remat_jax
_layers_remat_torch: RematBackend = layers_remat_torch
_layers_remat_tensorflow: RematBackend = layers_remat_tensorflow
_models_blocks_order_jax: OrderBackend = models_blocks_order_jax
_models_blocks_order_torch: OrderBackend = models_blocks_order_torch
_ops__recompute_jax: RecomputeBackend = ops__recompute_jax
_ops__recompute_torch: RecomputeBackend = ops__recompute_torch
_ops__recompute_tensorflow: RecomputeBackend = ops__recompute_tensorflow
_tools_compare_backends_openxla_torch: OpenXLABackend = tools_compare_backends_openxla_torch
_tools_convert_graphs_jax: GraphsBackend = tools_convert_graphs_jax
_tools_convert_graphs_torch: GraphsBackend = tools_convert_graphs_torch
_tools_convert_graphs_tensorflow: GraphsBackend = tools_convert_graphs_tensorflow
_tools_doctor_jax: DoctorBackend = tools_doctor_jax
_tools_doctor_torch: DoctorBackend = tools_doctor_torch
_tools_doctor_tensorflow: DoctorBackend = tools_doctor_tensorflow
_tools_plan_facts_jax: FactsBackend = tools_plan_facts_jax
_tools_plan_facts_torch: FactsBackend = tools_plan_facts_torch
_tools_plan_facts_tensorflow: FactsBackend = tools_plan_facts_tensorflow
_training_optax_jax: OptaxBackend = training_optax_jax
_training_optimizers_torch: OptimizersBackend = training_optimizers_torch
_training_optimizers_tensorflow: OptimizersBackend = training_optimizers_tensorflow
_training_set_criterion_torch: AssignmentBackend = training_set_criterion_torch
_training_step_jax: StepBackend = training_step_jax
_training_step_torch: StepBackend = training_step_torch
_training_step_tensorflow: StepBackend = training_step_tensorflow
_training_train_step_jax: TrainStepBackend = training_train_step_jax
_training_train_step_torch: TrainStepBackend = training_train_step_torch
_training_train_step_tensorflow: TrainStepBackend = training_train_step_tensorflow
_transforms_engine_jax: TransformsBackend = transforms_engine_jax
_transforms_engine_torch: TransformsBackend = transforms_engine_torch
_transforms_engine_tensorflow: TransformsBackend = transforms_engine_tensorflow
_weights_host_jax: HostBackend = weights_host_jax
_weights_host_torch: HostBackend = weights_host_torch
_weights_host_tensorflow: HostBackend = weights_host_tensorflow
