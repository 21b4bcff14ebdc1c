"""Serving: hybrid models whose prefix cache lives inside the jitted step.

    model_config = small_config("kda-mla")
    model = init_model(jax.random.key(0), model_config)
    config = ServeConfig(cache=cache_config, max_length=1024, num_requests=16,
                         decode_lanes=8, chunk_tokens=256)
    pages, swa_pages, slots = config.pool_pages
    pools = init_pools(model_config, num_pages=pages, num_swa_pages=swa_pages,
                       num_slots=slots, page_size=cache_config.page_size)

    engine = Engine(model, config, pools)      # on the host, thin
    engine.generate(prompts, max_tokens=64)

    MeshEngine(model, config, make_pools, mesh)    # the same, with ranks on a mesh

    state = init_serving(config, pools)        # or without it: a pure function
    state, record = serve_steps(model, state, num_steps=8)

`python -m uhrc_fn.serving` serves conversations with and without the cache.
"""

from .config import ServeConfig as ServeConfig
from .desk import Request as Request
from .desk import Stats as Stats
from .engine import Engine as Engine
from .lanes import Lanes as Lanes
from .lanes import Pools as Pools
from .mesh_engine import MeshEngine as MeshEngine
from .models.config import FAMILIES as FAMILIES
from .models.config import ModelConfig as ModelConfig
from .models.config import small_config as small_config
from .models.model import Model as Model
from .models.model import forward as forward
from .models.model import init_model as init_model
from .models.model import init_pools as init_pools
from .models.shard import shard_model as shard_model
from .models.traits import ModelTraits as ModelTraits
from .models.traits import traits_from_hf_config as traits_from_hf_config
from .requests import Arrivals as Arrivals
from .requests import Phase as Phase
from .requests import Requests as Requests
from .requests import enqueue as enqueue
from .state import ServeState as ServeState
from .state import init_serving as init_serving
from .step import StepRecord as StepRecord
from .step import serve_step as serve_step
from .step import serve_steps as serve_steps
