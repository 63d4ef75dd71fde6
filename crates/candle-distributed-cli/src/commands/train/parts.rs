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
    what: StrategyArgs,
    /// Values that each unit of a sharded model keeps from its forward to its backward pass [default:
    /// inputs]
    #[arg(long, value_enum, help_heading = "Sharding")]
    keep: Option<Keep>,
    /// Number of units gathered ahead of the one in use, while that is computed [default: 0]
    #[arg(long, value_name = "UNITS", help_heading = "Sharding")]
    prefetch: Option<usize>,
    /// Run the optimizer of each unit of a sharded model inside the backward pass, so that
    /// gradients of all of it are never there at once
    #[arg(long, visible_alias = "optimizer-in-bwd", help_heading = "Sharding")]
    optimizer_in_backward: bool,
}

impl ShardingArgs {
    /// Returns the sharding over `world_size` devices, or `None` if every device has the whole model.
    pub(super) fn asked(&self, world_size: WorldSize) -> Result<Option<Sharding>> {
        let Some(strategy) = self.what.asked()? else {
            return match self.sharding_option() {
                Some(option) => Err(Error::usage(format!(
                    "{option} needs a --strategy: without one every device has the whole model"
                ))),
                None => Ok(None),
            };
        };
        let replicas = self.what.replicas();
        if self.devices_of_copy(world_size).is_none() {
            return Err(Error::usage(format!(
                "--replicas {replicas} does not divide the {world_size} devices"
            )));
        }
        Ok(Some(Sharding {
            strategy,
            keep: self.keep.unwrap_or(Keep::Inputs),
            replicas,
            prefetch: self.prefetch.unwrap_or(0),
            optimizer_in_backward: self.optimizer_in_backward,
        }))
    }

    /// Returns the number of devices that share a copy of the model, or `None` if the copies do not
    /// divide the devices.
    fn devices_of_copy(&self, world_size: WorldSize) -> Option<usize> {
        let replicas = usize::try_from(self.what.replicas()).ok()?;
        let devices = world_size.as_usize().checked_div(replicas)?;
        (devices * replicas == world_size.as_usize()).then_some(devices)
    }

    /// Returns the axes of the devices: the devices that share a copy of the model are neighbors along
    /// the last axis.
    ///
    /// The axes follow from the options alone, so that a process that cannot start still joins the
    /// mesh.
    pub(super) fn grid(&self, world_size: WorldSize) -> DeviceMeshBuilder {
        let grid = DeviceMesh::builder();
        let devices = world_size.as_usize();
        match self.devices_of_copy(world_size) {
            Some(of_copy) if of_copy < devices => {
                grid.axis("replicas", devices / of_copy).axis("shards", of_copy)
            }
            // Copies that do not divide the devices are rejected when the run starts.
            Some(_) | None => grid.axis(DeviceMesh::AXIS, devices),
        }
    }

    /// Returns a given option that only applies to sharded models.
    fn sharding_option(&self) -> Option<&'static str> {
        let options = [
            ("--replicas", self.what.replicas.is_some()),
            ("--keep", self.keep.is_some()),
            ("--prefetch", self.prefetch.is_some()),
            ("--optimizer-in-backward", self.optimizer_in_backward),
        ];
        options.into_iter().find_map(|(option, is_given)| is_given.then_some(option))
    }

    /// Returns the options to type when the run is resumed, each with a space before it.
    pub(super) fn typed(&self) -> String {
        let keep = self.keep.map(|keep| format!(" --keep {}", help::typed(keep)));
        let prefetch = self.prefetch.map(|units| format!(" --prefetch {units}"));
        let in_backward = self.optimizer_in_backward.then(|| " --optimizer-in-backward".to_owned());
        let options = [Some(self.what.typed()), keep, prefetch, in_backward];
        options.into_iter().flatten().collect()
    }
}
