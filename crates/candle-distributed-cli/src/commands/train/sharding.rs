//! The sharding options of `train`.

use candle_distributed::{
    finetune::cost::{Keep, Sharding},
    mesh::{DeviceMesh, DeviceMeshBuilder},
    types::WorldSize,
};

use crate::{
    error::{Error, Result},
    help,
    strategy::StrategyArgs,
};

/// The sharding of the model.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ShardingArgs {
    #[command(flatten)]
    strategy: StrategyArgs,
    /// Values that each unit of a sharded model keeps from its forward to its backward pass [default:
    /// inputs]
    #[arg(long, value_enum, help_heading = "Sharding")]
    keep: Option<Keep>,
    /// Number of units to gather in advance, while the current one is computed [default: 0]
    #[arg(long, value_name = "UNITS", help_heading = "Sharding")]
    prefetch: Option<usize>,
}

impl ShardingArgs {
    /// Returns the sharding over `world_size` devices, or `None` if every device has the whole model.
    pub(super) fn resolve(&self, world_size: WorldSize) -> Result<Option<Sharding>> {
        let Some(strategy) = self.strategy.explicit_strategy()? else {
            return match self.given_sharding_option() {
                Some(option) => Err(Error::usage(format!(
                    "{option} needs a --strategy: without one every device has the whole model"
                ))),
                None => Ok(None),
            };
        };
        let replicas = self.strategy.replicas();
        if self.n_devices_per_copy(world_size).is_none() {
            return Err(Error::usage(format!(
                "--replicas {replicas} does not divide the {world_size} devices"
            )));
        }
        Ok(Some(Sharding {
            strategy,
            keep: self.keep.unwrap_or(Keep::Inputs),
            replicas,
            prefetch: self.prefetch.unwrap_or(0),
            ..Sharding::default()
        }))
    }

    /// Returns the number of devices that share a copy of the model, or `None` if the number of
    /// copies does not divide the number of devices.
    fn n_devices_per_copy(&self, world_size: WorldSize) -> Option<usize> {
        let replicas = usize::try_from(self.strategy.replicas()).ok()?;
        let per_copy = world_size.as_usize().checked_div(replicas)?;
        (per_copy * replicas == world_size.as_usize()).then_some(per_copy)
    }

    /// Returns a mesh builder with the axes of the devices. Devices that share a copy of the model are
    /// neighbors along the last axis.
    ///
    /// The axes follow from the options alone, so that a process that cannot start training still
    /// joins the mesh.
    pub(super) fn grid(&self, world_size: WorldSize) -> DeviceMeshBuilder {
        let builder = DeviceMesh::builder();
        let n_devices = world_size.as_usize();
        match self.n_devices_per_copy(world_size) {
            Some(per_copy) if per_copy < n_devices => {
                builder.axis("replicas", n_devices / per_copy).axis("shards", per_copy)
            }
            // `resolve` rejects a number of copies that does not divide the number of devices.
            Some(_) | None => builder.axis(DeviceMesh::AXIS, n_devices),
        }
    }

    /// Returns the first given option that only applies to sharded models.
    fn given_sharding_option(&self) -> Option<&'static str> {
        let options = [
            ("--replicas", self.strategy.replicas.is_some()),
            ("--keep", self.keep.is_some()),
            ("--prefetch", self.prefetch.is_some()),
        ];
        options.into_iter().find_map(|(option, is_given)| is_given.then_some(option))
    }

    /// Returns the options to repeat when the run is resumed, each after a space.
    pub(super) fn option_string(&self) -> String {
        let keep = self.keep.map(|keep| format!(" --keep {}", help::cli_name(keep)));
        let prefetch = self.prefetch.map(|units| format!(" --prefetch {units}"));
        let options = [Some(self.strategy.option_string()), keep, prefetch];
        options.into_iter().flatten().collect()
    }
}
